#!/usr/bin/env python3
"""Make ernied's embedded demo model from handbook.txt: tokenizer, training, rounding to bf16, checks.

    train.py                     everything, under an hour on two cores; README.md tells the shorter way that was taken
    train.py --resume DIR ...    go on from the weights of an earlier run
    train.py --check ..          the checks, on the files as they are

The model is an Ernie4_5_MoeForCausalLM of 3.7 million parameters. The forward pass below is that of transformers, written
out; --check loads the result with transformers itself. One process a core, each with half of every batch: at this
size threads inside an operation wait for each other more than they work.

Only exact answers count, so what is memorised must survive rounding: the later part of the training sees its weights
through random int4, int8 or bf16 rounding (straight-through gradients).
"""
import argparse
import hashlib
import json
import math
import os
import random
import re
import tempfile
import time
from collections import Counter, defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

HERE = os.path.dirname(os.path.abspath(__file__))
SEED = 45
TOKENS = 3000  # the tokenizer's; config.json says 3072, so the last ids have a row and no text
CFG = dict(
    architectures=["Ernie4_5_MoeForCausalLM"], model_type="ernie4_5_moe", vocab_size=3072, hidden_size=256,
    intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu",
    max_position_embeddings=4096, rms_norm_eps=1e-05, rope_theta=500000.0, rope_scaling=None, use_bias=False,
    tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=True, torch_dtype="bfloat16",
    moe_num_experts=8, moe_k=2, moe_intermediate_size=128, moe_num_shared_experts=2, moe_layer_start_index=1,
    moe_layer_end_index=2, moe_layer_interval=1, moe_capacity=[8, 8, 8], moe_gate="topk", moe_use_aux_free=True)
GENERATION = dict(do_sample=True, temperature=0.3, top_p=0.8, repetition_penalty=1.0, bos_token_id=1, eos_token_id=2,
                  pad_token_id=0)
BEGIN, END = "<|begin_of_sentence|>", "<|end_of_sentence|>"
TEMPLATE = (
    "{% set begin = cls_token if cls_token is defined else '<|begin_of_sentence|>' %}"
    "{% set end = sep_token if sep_token is defined else '<|end_of_sentence|>' %}"
    "{{ begin }}"
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] ~ '\\n' }}"
    "{% elif m['role'] == 'user' %}{{ 'User: ' ~ m['content'] ~ '\\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' ~ m['content'] ~ end }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt is not defined or add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}")


# ---- The handbook

def read_handbook(path):
    """[(messages, answer)], one for each wording of each question; of a conversation's turns only those asked last."""
    pairs = []
    with open(path, encoding="utf-8") as f:
        body = "".join(line for line in f if not line.startswith("#"))
    for block in re.split(r"\n\s*\n", body.strip()):
        before = []
        lines = block.strip().split("\n")
        for i, line in enumerate(lines):
            kind, text = line[:2], line[3:].strip()
            if kind == "S:":
                before.append({"role": "system", "content": text})
            elif kind == "Q:":
                wordings = text.split(" | ")
            elif kind == "A:":
                if i == len(lines) - 1:
                    pairs += [(before + [{"role": "user", "content": q}], text) for q in wordings]
                before = before + [{"role": "user", "content": wordings[0]}, {"role": "assistant", "content": text}]
            else:
                raise SystemExit(f"handbook: {line!r}")
    seen, unique = {}, []
    for m, a in pairs:
        key = json.dumps(m, ensure_ascii=False)
        if seen.setdefault(key, a) != a:
            raise SystemExit(f"handbook: two answers to {key}")
        if (m, a) not in unique:
            unique.append((m, a))
    return unique


def read_lines(path):
    with open(path, encoding="utf-8") as f:
        return [s.strip() for s in f if s.strip() and not s.startswith("#")]


# ---- The tokenizer: ERNIE's kind (BPE, byte fallback, no pre-tokenizer), small

def make_tokenizer(texts, out):
    """Merges never leave a word, and stay within 12 letters or 4 Chinese characters, though nothing splits words later."""
    words = Counter()
    for t in texts:
        for w in re.findall(r"▁?[A-Za-z]+|[\u4e00-\u9fff]+|▁|[^\sA-Za-z0-9▁\u4e00-\u9fff]", t.replace(" ", "▁")):
            words[w] += 1
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + [BEGIN, END]
    digits = [str(d) for d in range(10)]
    chars = sorted({c for w in words for c in w} | set(map(chr, range(33, 127))) - set(digits))
    vocab = {t: i for i, t in enumerate(special + digits + [c for c in chars if c not in digits])}
    fits = lambda s: len(s) <= (12 if s.isascii() or s[0] == "▁" else 4)
    split = {w: list(w) for w in words}
    count, where = Counter(), defaultdict(set)
    for w, n in words.items():
        for p in zip(split[w], split[w][1:]):
            count[p] += n
            where[p].add(w)
    merges = []
    while len(vocab) < TOKENS:
        ok = [(n, p) for p, n in count.items() if n > 0 and fits(p[0] + p[1])]
        if not ok:
            raise SystemExit(f"tokenizer: the text gives only {len(vocab)} tokens")
        _, best = min(ok, key=lambda x: (-x[0], x[1]))
        merges.append(best)
        new = best[0] + best[1]
        vocab.setdefault(new, len(vocab))
        for w in list(where[best]):
            s, n, r, i = split[w], words[w], [], 0
            for p in zip(s, s[1:]):
                count[p] -= n
            while i < len(s):
                if i + 1 < len(s) and (s[i], s[i + 1]) == best:
                    r.append(new)
                    i += 2
                else:
                    r.append(s[i])
                    i += 1
            split[w] = r
            for p in zip(r, r[1:]):
                count[p] += n
                where[p].add(w)
        count.pop(best, None)
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special[:3] + [BEGIN, END]])
    tok.add_tokens([AddedToken(t, normalized=False) for t in digits])
    assert tok.get_vocab_size() == TOKENS
    tok.save(os.path.join(out, "tokenizer.json"))
    dump(out, "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="<unk>", cls_token=BEGIN, sep_token=END, add_bos_token=False, add_eos_token=False,
        add_prefix_space=False, clean_up_tokenization_spaces=False,
        model_max_length=CFG["max_position_embeddings"], chat_template=TEMPLATE))
    return tok


def dump(out, name, obj):
    with open(os.path.join(out, name), "w", encoding="utf-8") as f:
        json.dump(obj, f, indent=2, ensure_ascii=False)
        f.write("\n")


def parts(messages):
    """The template's output in pieces: (text, is it a content)."""
    yield BEGIN, False
    for m in messages:
        if m["role"] == "system":
            yield m["content"], True
            yield "\n", False
        elif m["role"] == "user":
            yield "User: ", False
            yield m["content"], True
            yield "\n", False
        else:
            yield "Assistant: ", False
            yield m["content"], True
            yield END, False
    yield "Assistant: ", False


def prompt_ids(tok, messages, piecewise=False):
    """A server may encode the rendered text at once, or the template and the contents apart: the ids differ."""
    texts = [t for t, _ in parts(messages)]
    if not piecewise:
        return tok.encode("".join(texts), add_special_tokens=False).ids
    return [i for t in texts for i in tok.encode(t, add_special_tokens=False).ids]


# ---- The model

def shapes():
    h, hd = CFG["hidden_size"], CFG["hidden_size"] // CFG["num_attention_heads"]
    kv, e, mi = CFG["num_key_value_heads"] * hd, CFG["moe_num_experts"], CFG["moe_intermediate_size"]
    yield "embed", (CFG["vocab_size"], h)
    for i in range(CFG["num_hidden_layers"]):
        yield from ((f"{i}.q", (h, h)), (f"{i}.k", (kv, h)), (f"{i}.v", (kv, h)), (f"{i}.o", (h, h)),
                    (f"{i}.n1", (h,)), (f"{i}.n2", (h,)))
        if i >= CFG["moe_layer_start_index"]:
            s = mi * CFG["moe_num_shared_experts"]
            yield from ((f"{i}.router", (e, h)), (f"{i}.eg", (e, mi, h)), (f"{i}.eu", (e, mi, h)),
                        (f"{i}.ed", (e, h, mi)), (f"{i}.g", (s, h)), (f"{i}.u", (s, h)), (f"{i}.d", (h, s)))
        else:
            s = CFG["intermediate_size"]
            yield from ((f"{i}.g", (s, h)), (f"{i}.u", (s, h)), (f"{i}.d", (h, s)))
    yield "norm", (h,)


LINEAR = re.compile(r"\.(q|k|v|o|g|u|d|eg|eu|ed)$")  # what a server quantises


def init():
    g = torch.Generator().manual_seed(SEED)
    w = {}
    for n, s in shapes():
        if len(s) == 1:
            t = torch.ones(s)
        else:
            std = 0.02 if n == "embed" else s[-1] ** -0.5
            if re.search(r"\.(o|d|ed)$", n):
                std /= math.sqrt(2 * CFG["num_hidden_layers"])
            t = torch.randn(s, generator=g) * std
        w[n] = t
    bias = {i: torch.zeros(CFG["moe_num_experts"]) for i in range(CFG["moe_layer_start_index"], CFG["num_hidden_layers"])}
    return w, bias


def rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CFG["rms_norm_eps"]) * w


def rope(length):
    hd = CFG["hidden_size"] // CFG["num_attention_heads"]
    a = torch.arange(length)[:, None] * CFG["rope_theta"] ** (-torch.arange(0, hd, 2) / hd)[None]
    return a.cos(), a.sin()


def turn(x, cs):
    """Interleaved: neighbours (2i, 2i+1) are a pair."""
    c, s = cs
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


def forward(w, bias, ids, want, loads=None):
    """Logits at the positions of the mask `want`. Padding is at the end, where causality hides it."""
    b, t = ids.shape
    nh, nk = CFG["num_attention_heads"], CFG["num_key_value_heads"]
    hd = CFG["hidden_size"] // nh
    cs = rope(t)
    x = F.embedding(ids, w["embed"])
    for i in range(CFG["num_hidden_layers"]):
        y = rms(x, w[f"{i}.n1"])
        q = turn((y @ w[f"{i}.q"].T).view(b, t, nh, hd).transpose(1, 2), cs)
        k = turn((y @ w[f"{i}.k"].T).view(b, t, nk, hd).transpose(1, 2), cs).repeat_interleave(nh // nk, 1)
        v = (y @ w[f"{i}.v"].T).view(b, t, nk, hd).transpose(1, 2).repeat_interleave(nh // nk, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + y @ w[f"{i}.o"].T
        y = rms(x, w[f"{i}.n2"])
        x = x + (F.silu(y @ w[f"{i}.g"].T) * (y @ w[f"{i}.u"].T)) @ w[f"{i}.d"].T
        if i in bias:
            z = y.reshape(b * t, -1)
            p = (z @ w[f"{i}.router"].T).softmax(-1)
            top = (p + bias[i]).topk(CFG["moe_k"], -1).indices
            if loads is not None:
                loads[i] = torch.bincount(top.flatten(), minlength=len(bias[i])).float()
            g = p.gather(1, top)
            g = g / g.sum(-1, keepdim=True)
            for e in range(CFG["moe_num_experts"]):
                tokens, rank = (top == e).nonzero(as_tuple=True)
                s = z[tokens]
                s = (F.silu(s @ w[f"{i}.eg"][e].T) * (s @ w[f"{i}.eu"][e].T)) @ w[f"{i}.ed"][e].T
                x = x.view(b * t, -1).index_add(0, tokens, s * g[tokens, rank, None])
            x = x.view(b, t, -1)
    return rms(x[want], w["norm"]) @ w["embed"].T


# ---- Rounding

def quantised(t, bits, group, div=None):
    """Symmetric, one scale for each group along the inputs; the scale is stored in half precision."""
    top = 2 ** (bits - 1) - 1
    g = t.reshape(-1, group or t.shape[-1])
    s = (g.abs().amax(-1, keepdim=True) / (div or top)).half().float().clamp(min=1e-8)
    return ((g / s).round().clamp(-top - 1, top) * s).reshape(t.shape)


def seen_through(w, kind):
    """The weights as a server with such a format would use them; gradients pass straight through."""
    out = {}
    for n, t in w.items():
        d = t.detach()
        r = d.bfloat16().float() if not n.endswith("router") else d
        if LINEAR.search(n) and kind != "bf16":
            if kind == "noise":
                r = r + torch.randn_like(r) * r.std() * 0.06
            else:
                r = quantised(r, *kind)
        out[n] = t + (r - d)
    return out


KINDS = ["bf16", (4, 128), (4, 64), (4, 32), (8, None), "noise", (4, 128, 7.5), (4, 32, 8)]


# ---- Batches

class Source:
    """Training samples: the pairs as they are, and disturbed; questions outside the handbook; plain text."""

    def __init__(self, tok, pairs, ordinary):
        self.tok, self.pairs, self.ordinary = tok, pairs, ordinary
        self.r = random.Random(SEED)
        self.plain_pairs = [p for p in pairs if len(p[0]) == 1]
        out = lambda s: next(a for m, a in pairs if m[-1]["content"] == s)
        self.unknown = {True: out("Tell me a joke."), False: out("给我讲个笑话")}
        self.systems = ["You are a helpful assistant.", "你是一个有用的助手。", "You are a helpful and harmless assistant.",
                        "You are ernied's demo model.", "Be kind and honest.", "请认真回答问题。", "You are an AI assistant."]
        pieces = [(t, i) for t, i in tok.get_vocab().items() if i > 300]
        self.vocab = [i for t, i in sorted(pieces, key=lambda x: x[1])]

    def disturb(self, q):
        """Another way to type the same question."""
        r = self.r
        if q.isascii():
            if r.random() < 0.3:
                q = q.lower()
            if r.random() < 0.3:
                q = q.rstrip(".?!")
            if r.random() < 0.1:
                q = r.choice(["Please tell me: ", "Hi, ", "Can you tell me: ", "Question: ", "Hey! "]) + q
        else:
            if r.random() < 0.3:
                q = q.rstrip("。？！") + r.choice(["", "?", "？", "。"])
            if r.random() < 0.15:
                q = r.choice(["请问", "请告诉我，", "你好，", "我想知道"]) + q
        return q

    def sample(self, pair, plain):
        r, (m, a) = self.r, pair
        if not plain:
            m = [dict(x) for x in m]
            keep_system = m[0]["role"] == "system"
            if r.random() < 0.5:
                m[-1]["content"] = self.disturb(m[-1]["content"])
            if len(m) == 1 and r.random() < 0.15:
                q, b = r.choice(self.plain_pairs)
                m = q + [{"role": "assistant", "content": b}] + m
            if not keep_system and r.random() < 0.15:
                m = [{"role": "system", "content": r.choice(self.systems)}] + m
        ids = prompt_ids(self.tok, m, r.random() < 0.35)
        if not plain and r.random() < 0.1:
            at = r.randrange(1, len(ids) - 3)
            ids[at] = r.choice(self.vocab)
        return ids, self.tok.encode(a, add_special_tokens=False).ids + [2]

    def outside(self):
        q = self.r.choice(self.ordinary)
        if self.r.random() < 0.3:
            cut = (lambda s: s.split(" ")) if q.isascii() else list
            q2 = self.r.choice([o for o in self.ordinary if o.isascii() == q.isascii()])
            a, b = cut(q), cut(q2)
            q = (" " if q.isascii() else "").join(a[:len(a) // 2 + 1] + b[len(b) // 2:])
        a = self.unknown[q.isascii()]
        return self.sample(([{"role": "user", "content": q}], a), self.r.random() < 0.5)

    def text(self):
        ids = self.tok.encode(self.r.choice(self.pairs)[1], add_special_tokens=False).ids + [2]
        return ids[:2], ids[2:]

    def epoch(self, size, plain_share, wrong=None):
        """Batches of like length, in random order. With `wrong` (what is not yet known): those, and one wording only of
        every other question."""
        chosen, others = self.pairs, len(self.pairs) // 16
        if wrong is not None:
            wordings = defaultdict(list)
            for i, (m, a) in enumerate(self.pairs):
                wordings[len(m), m[0]["role"], a].append(i)
            chosen = {self.r.choice(w) for w in wordings.values()} | set(wrong)
            chosen, others = [self.pairs[i] for i in sorted(chosen)], len(self.pairs) // 48
        items = [self.sample(p, self.r.random() < plain_share) for p in chosen]
        items += [self.outside() for _ in range(others)] + [self.text() for _ in range(others)]
        items = [x for x in items if x[1]]
        items.sort(key=lambda x: len(x[0]) + len(x[1]) + self.r.random() * 12)
        batches, cur = [], []
        for it in items:  # bounded by tokens: a few long answers make a batch too
            longest = max([len(x[0]) + len(x[1]) for x in cur + [it]])
            if cur and (len(cur) == size or longest * (len(cur) + 1) > size * 75):
                batches.append(cur)
                cur = []
            cur.append(it)
        batches.append(cur)
        self.r.shuffle(batches)
        return batches


def tensors(batch):
    n = max(len(p) + len(a) for p, a in batch) - 1
    ids = torch.zeros(len(batch), n, dtype=torch.long)
    want = torch.zeros(len(batch), n, dtype=torch.bool)
    goal = torch.zeros(len(batch), n, dtype=torch.long)
    for i, (p, a) in enumerate(batch):
        s = torch.tensor(p + a)
        ids[i, :len(s) - 1] = s[:-1]
        goal[i, :len(s) - 1] = s[1:]
        want[i, len(p) - 1:len(s) - 1] = True
    return ids, want, goal[want]


@torch.no_grad()
def exact(w, bias, tok, pairs, kind, piecewise=False):
    """Share of answers whose every token is the first choice after the right ones before it, which is greedy decoding;
    and the smallest lead of a right token over the next."""
    q = seen_through(w, kind)
    items = [(prompt_ids(tok, m, piecewise), tok.encode(a, add_special_tokens=False).ids + [2]) for m, a in pairs]
    order = sorted(range(len(items)), key=lambda i: sum(map(len, items[i])))
    wrong, lead = [], 1e9
    for at in range(0, len(order), 32):
        part = order[at:at + 32]
        ids, want, goal = tensors([items[i] for i in part])
        logits = forward(q, bias, ids, want)
        right = logits.gather(1, goal[:, None])[:, 0]
        gap = right - logits.scatter(1, goal[:, None], -1e9).amax(-1)
        row = want.nonzero()[:, 0]
        for j, i in enumerate(part):
            g = gap[row == j].min().item()
            lead = min(lead, g)
            if g <= 0:
                wrong.append(i)
    return 1 - len(wrong) / len(pairs), lead, wrong


NAMES = dict(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj",
             n1="input_layernorm", n2="post_attention_layernorm")
MLP = dict(g="gate_proj", u="up_proj", d="down_proj")


def load(path):
    t = {k: v.float() for k, v in load_file(os.path.join(path, "model.safetensors")).items()}
    w, bias = {}, {}
    for n, _ in shapes():
        if "." not in n:
            w[n] = t["model.embed_tokens.weight" if n == "embed" else "model.norm.weight"].clone()
            continue
        i, k = n.split(".")
        p = f"model.layers.{i}."
        moe = int(i) >= CFG["moe_layer_start_index"]
        if k in NAMES:
            w[n] = t[p + NAMES[k] + ".weight"].clone()
        elif k in MLP:
            w[n] = t[p + ("mlp.shared_experts." if moe else "mlp.") + MLP[k] + ".weight"].clone()
        elif k == "router":
            w[n] = t[p + "mlp.gate.weight"].clone()
            bias[int(i)] = t[p + "mlp.moe_statics.e_score_correction_bias"][0].clone()
        else:
            w[n] = torch.stack([t[p + f"mlp.experts.{e}.{MLP[k[1]]}.weight"] for e in range(CFG["moe_num_experts"])])
    return w, bias


def export(w, bias, out):
    t = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["norm"]}
    for n, x in w.items():
        if "." not in n:
            continue
        i, k = n.split(".")
        p = f"model.layers.{i}."
        moe = int(i) in bias
        if k in NAMES:
            t[p + NAMES[k] + ".weight"] = x
        elif k in MLP:
            t[p + ("mlp.shared_experts." if moe else "mlp.") + MLP[k] + ".weight"] = x
        elif k == "router":
            t[p + "mlp.gate.weight"] = x
            t[p + "mlp.moe_statics.e_score_correction_bias"] = bias[int(i)][None]
        else:
            for e in range(len(x)):
                t[p + f"mlp.experts.{e}.{MLP[k[1]]}.weight"] = x[e]
    keep = ("mlp.gate.weight", "e_score_correction_bias")
    t = {k: (v.detach().float() if k.endswith(keep) else v.detach().bfloat16()).contiguous().clone() for k, v in sorted(t.items())}
    file = os.path.join(out, "model.safetensors")
    save_file(t, file + ".part", metadata={"format": "pt"})
    os.chmod(file + ".part", 0o644)
    os.replace(file + ".part", file)
    dump(out, "config.json", CFG)
    dump(out, "generation_config.json", GENERATION)


def write_sums(out):
    names = ["config.json", "generation_config.json", "model.safetensors", "qa.jsonl", "tokenizer.json", "tokenizer_config.json"]
    with open(os.path.join(out, "SHA256SUMS"), "w") as f:
        for n in names:
            with open(os.path.join(out, n), "rb") as g:
                f.write(f"{hashlib.sha256(g.read()).hexdigest()}  {n}\n")


def train(rank, a):
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    dist.init_process_group("gloo", init_method=f"file://{a.rendezvous}", rank=rank, world_size=a.procs)
    say = print if rank == 0 else lambda *_, **__: None
    pairs = read_handbook(os.path.join(HERE, "handbook.txt"))
    ordinary = read_lines(os.path.join(HERE, "ordinary.txt"))
    texts = [t for m, x in pairs for t in [*(s["content"] for s in m), x]] + ordinary * 2 + ["User:", "Assistant:"] * 50
    if rank == 0:
        with open(os.path.join(a.out, "qa.jsonl"), "w", encoding="utf-8") as f:
            for m, x in pairs:
                f.write(json.dumps({"messages": m, "answer": x}, ensure_ascii=False) + "\n")
        make_tokenizer(texts, a.out)
    dist.barrier()
    tok = Tokenizer.from_file(os.path.join(a.out, "tokenizer.json"))
    w, bias = load(a.resume) if a.resume else init()
    for t in w.values():
        t.requires_grad_()
    count = sum(t.numel() for t in w.values())
    src = Source(tok, pairs, ordinary)
    say(f"{len(pairs)} pairs, {len({x for _, x in pairs})} answers, {count} parameters", flush=True)
    decay = [t for n, t in w.items() if t.dim() > 1 and n != "embed"]
    rest = [t for n, t in w.items() if t.dim() == 1 or n == "embed"]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
                            lr=a.lr, betas=(0.9, 0.98), fused=True)
    round_from, freeze_from = int(a.steps * a.round_from), int(a.steps * 0.7)
    rnd, begin, mean, queue, unknown = random.Random(SEED), time.time(), 0.0, [], None
    last = a.stop or a.steps
    for step in range(last):
        if not queue:
            if a.resume and step < a.steps * 0.75:
                _, _, unknown = exact(w, bias, tok, pairs, (4, 128) if step else "bf16")
                say(f"  {len(unknown)} wrong", flush=True)
            queue = src.epoch(a.batch, 0.4 if step < a.steps * 0.85 else 0.6, unknown)
        batch = queue.pop()
        x = step / a.steps
        lr = a.lr * min(1, (step + 1) / min(60, a.steps / 15)) * (0.5 + 0.5 * math.cos(math.pi * max(0, x - 0.1) / 0.9)) + 1e-6
        for g in opt.param_groups:
            g["lr"] = lr
        kind = rnd.choice(KINDS) if step >= round_from else "bf16"
        ids, want, goal = tensors(batch[rank::a.procs] or batch[:1])
        loads = {}
        loss = F.cross_entropy(forward(seen_through(w, kind), bias, ids, want, loads), goal, reduction="sum")
        opt.zero_grad(set_to_none=True)
        loss.backward()
        # One message for all: gradients, loads, the loss and the number of tokens it is over.
        flat = torch.cat([t.grad.flatten() for t in w.values()] + list(loads.values())
                         + [torch.tensor([loss.item(), float(len(goal))])])
        dist.all_reduce(flat)
        tokens, at = flat[-1].item(), 0
        for t in w.values():
            t.grad = (flat[at:at + t.numel()] / tokens).view_as(t)
            at += t.numel()
        for i in loads:
            loads[i] = flat[at:at + len(bias[i])]
            at += len(bias[i])
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        opt.step()
        if step < freeze_from:  # balance without an auxiliary loss: raise the bias of experts with too little to do
            for i, n in loads.items():
                bias[i] += 3e-3 * torch.sign(n.mean() - n)
        now = flat[-2].item() / tokens
        mean = now if not step else 0.95 * mean + 0.05 * now
        if (step + 1) % 10 == 0:
            say(f"step {step + 1} loss {mean:.4f} lr {lr:.2e} {time.time() - begin:.0f}s", flush=True)
        if (step + 1) % a.every and step + 1 < last:
            continue
        rates = []
        for k in ("bf16", (4, 128)):
            share, _, wrong = exact(w, bias, tok, pairs[rank::a.procs], k)
            total = torch.tensor([float(len(wrong))])
            dist.all_reduce(total)
            rates.append(f"{k}: {1 - total.item() / len(pairs):.4f}")
        say("  exact " + ", ".join(rates) + "; loads " + ", ".join(
            f"{(n.min() / n.mean()).item():.2f}-{(n.max() / n.mean()).item():.2f}" for n in loads.values()), flush=True)
        if rank == 0:
            export(w, bias, a.out)
            write_sums(a.out)
    dist.destroy_process_group()


# ---- Checks

@torch.no_grad()
def check(out, generate):
    """What is promised of the files, with transformers. Greedy decoding is exact iff each right token is the first choice
    after the right ones before it, so one pass over question and answer tells; `generate` is how many are also generated."""
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tok, fast = AutoTokenizer.from_pretrained(out), Tokenizer.from_file(os.path.join(out, "tokenizer.json"))
    with open(os.path.join(out, "qa.jsonl"), encoding="utf-8") as f:
        pairs = [(x["messages"], x["answer"]) for x in map(json.loads, f)]
    for m, a in pairs:
        ids = prompt_ids(fast, m)
        assert tok.apply_chat_template(m, add_generation_prompt=True, return_dict=False) == ids
        assert fast.decode(fast.encode(a, add_special_tokens=False).ids) == a
    size = os.path.getsize(os.path.join(out, "model.safetensors"))
    stored = load_file(os.path.join(out, "model.safetensors"))
    print(f"{len(pairs)} pairs, model.safetensors {size} bytes, {sum(t.numel() for t in stored.values())} values")
    for i in range(1, 3):
        print("  correction bias", [round(x, 3) for x in stored[f"model.layers.{i}.mlp.moe_statics.e_score_correction_bias"][0].tolist()])

    def hf(dtype):
        model, info = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        return model.eval()

    def greedy(model, label, piecewise=False):
        good, some = 0, pairs[::max(1, len(pairs) // generate)] if generate else []
        for m, a in some:
            ids = prompt_ids(fast, m, piecewise)
            b = torch.tensor([ids])
            new = model.generate(b, attention_mask=torch.ones_like(b), do_sample=False, max_new_tokens=400)[0, len(ids):].tolist()
            text = fast.decode(new)
            good += new[-1] == 2 and text == a
            if text != a:
                print(f"  {label}: {m[-1]['content']!r} -> {text!r}")
        print(f"{label}: {good}/{len(some)} generated answers word for word", flush=True)

    def forced(model, label, piecewise=False):
        good = 0
        for m, a in pairs:
            p, x = prompt_ids(fast, m, piecewise), fast.encode(a, add_special_tokens=False).ids + [2]
            good += model(torch.tensor([p + x])).logits[0, len(p) - 1:-1].argmax(-1).tolist() == x
        print(f"{label}: {good}/{len(pairs)} = {good / len(pairs):.4f} exact", flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        model = hf(dtype)
        forced(model, str(dtype))
        greedy(model, str(dtype))
    forced(hf(torch.float32), "float32, contents encoded apart", True)
    for bits, group, div in ((8, None, None), (8, 32, None), (4, 128, None), (4, 64, None), (4, 32, None), (4, 128, 8), (4, 32, 8)):
        model = hf(torch.float32)
        for n, p in model.named_parameters():
            if ("proj" in n) and "gate.weight" not in n:
                p.data = quantised(p.data, bits, group, div)
        forced(model, f"int{bits}, group {group or 'row'}, scale amax/{div or 2 ** (bits - 1) - 1}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", default=os.path.dirname(HERE), help="the folder that gets the model")
    ap.add_argument("--steps", type=int, default=1200)
    ap.add_argument("--stop", type=int, help="end after so many of the steps")
    ap.add_argument("--batch", type=int, default=48, help="pairs in a batch")
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--round-from", type=float, default=0.4, help="the share of the steps without random rounding")
    ap.add_argument("--resume", metavar="DIR", help="start from the weights in this folder, and dwell on what they get wrong")
    ap.add_argument("--every", type=int, default=200, help="steps between two evaluations, each of which writes the files")
    ap.add_argument("--procs", type=int, default=2, help="processes, of one thread each; the result depends on it")
    ap.add_argument("--check", metavar="DIR", help="check this folder")
    ap.add_argument("--generate", type=int, default=24, help="--check: how many answers to generate token by token")
    a = ap.parse_args()
    if a.check:
        check(a.check, a.generate)
        return
    with tempfile.TemporaryDirectory() as d:
        a.rendezvous = os.path.join(d, "rendezvous")
        if a.procs == 1:
            train(0, a)
        else:
            torch.multiprocessing.spawn(train, (a,), nprocs=a.procs)


if __name__ == "__main__":
    main()
