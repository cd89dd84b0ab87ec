"""The rest of the official OpenAI client against a running ernied: openai_more.py http://127.0.0.1:PORT"""

import enum
import json
import sys
import time

import openai
import pydantic

url = sys.argv[1]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is a language model?"}]

weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["北京", "Berlin"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}


def check_call(call):
    assert call.type == "function" and call.function.name == "get_weather", call
    arguments = json.loads(call.function.arguments)
    assert arguments["town"] in ("北京", "Berlin") and arguments["days"] in (1, 2, 3), arguments


def tools():
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        answer = client.chat.completions.create(
            model=model, messages=question, tools=[weather], tool_choice=choice, parallel_tool_calls=False,
            temperature=0, max_tokens=200,
        )
        assert answer.choices[0].finish_reason == reason, answer
        check_call(answer.choices[0].message.tool_calls[0])

    # In a stream the name comes whole and first, the arguments in pieces.
    names, arguments, call_id = [], "", None
    for chunk in client.chat.completions.create(
        model=model, messages=question, tools=[weather], tool_choice="required", parallel_tool_calls=False,
        temperature=0, max_tokens=200, stream=True,
    ):
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.function.name:
                names.append(delta.function.name)
                call_id = delta.id
            arguments += delta.function.arguments or ""
    assert names == ["get_weather"] and call_id, (names, call_id)
    assert json.loads(arguments)["days"] in (1, 2, 3), arguments

    # The result of a call goes back as a message of the tool.
    call = answer.choices[0].message
    answer = client.chat.completions.create(
        model=model, tools=[weather], max_tokens=16,
        messages=question + [call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}],
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls"), answer


class Mood(enum.Enum):
    good = "good"
    bad = "bad"


class Verdict(pydantic.BaseModel):
    mood: Mood
    certain: bool
    tags: list[Mood] = pydantic.Field(max_length=2)


def structured():
    parsed = client.chat.completions.parse(
        model=model, messages=question, response_format=Verdict, temperature=0, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Verdict), parsed

    with client.chat.completions.stream(
        model=model, messages=question, response_format=Verdict, temperature=1.0, seed=5, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds and isinstance(final.choices[0].message.parsed, Verdict), (kinds, final)

    # vLLM's own spellings, and several answers at once.
    for n in (1, 3):
        answer = client.chat.completions.create(
            model=model, messages=question, n=n, temperature=1.3, seed=1, max_tokens=40,
            extra_body={"structured_outputs": {"choice": ["yes", "不是", "maybe"]}},
        )
        assert all(c.message.content in ("yes", "不是", "maybe") for c in answer.choices), answer
    answer = client.chat.completions.create(
        model=model, messages=question, temperature=1.0, max_tokens=40, extra_body={"guided_regex": "[a-c]{3}-[0-9]{2}"}
    )
    assert len(answer.choices[0].message.content) == 6, answer


def logprobs():
    answer = client.completions.create(
        model=model, prompt="User: 你好\nAssistant: ", max_tokens=12, temperature=0, logprobs=4, echo=True
    )
    scores = answer.choices[0].logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset), scores
    assert scores.token_logprobs[0] is None and all(p <= 0 for p in scores.token_logprobs[1:]), scores
    assert answer.choices[0].text.startswith("User: 你好"), answer
    chat = client.chat.completions.create(
        model=model, messages=question, temperature=0, max_tokens=8, logprobs=True, top_logprobs=5
    )
    for token in chat.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 5
        assert token.logprob == max(t.logprob for t in token.top_logprobs), "greedy takes the most likely token"


def responses():
    first = client.responses.create(model=model, input="Hello", instructions="Be brief.", temperature=0)
    assert first.status == "completed" and first.output_text, first
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(model=model, input="你好", previous_response_id=first.id, max_output_tokens=24)
    assert second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens

    text, kinds = "", []
    for event in client.responses.create(model=model, input="Hello", temperature=0, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
    assert text == client.responses.create(model=model, input="Hello", temperature=0).output_text

    parsed = client.responses.parse(model=model, input="Hello", text_format=Verdict, temperature=0, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Verdict), parsed
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
        raise SystemExit("a deleted response is still there")
    except openai.NotFoundError:
        pass


def background():
    started = client.responses.create(model=model, input="Hello", background=True, temperature=0)
    assert started.status in ("queued", "in_progress"), started
    ended = wait(lambda: client.responses.retrieve(started.id), ("completed",))
    assert ended.output_text and ended.background, ended

    long = client.responses.create(
        model=model, input="Hello", background=True, max_output_tokens=900, extra_body={"ignore_eos": True}
    )
    cancelled = client.responses.cancel(long.id)
    assert cancelled.status in ("cancelled", "incomplete"), cancelled
    assert client.responses.retrieve(long.id).status == cancelled.status

    # One connection ends after two events; the next one goes on from there.
    began = client.responses.create(
        model=model, input="Hello", background=True, stream=True, max_output_tokens=600, temperature=0,
        extra_body={"ignore_eos": True},
    )
    first = [next(began), next(began)]
    began.close()
    id, seen = first[0].response.id, first[-1].sequence_number
    rest = list(client.responses.retrieve(id, stream=True, starting_after=seen))
    assert [e.sequence_number for e in rest] == list(range(seen + 1, seen + 1 + len(rest))), rest
    assert rest[-1].type in ("response.completed", "response.incomplete"), rest[-1]
    text = "".join(e.delta for e in rest if e.type == "response.output_text.delta")
    assert text and client.responses.retrieve(id).output_text == text, text


def wait(look, states):
    until = time.monotonic() + 60
    while True:
        seen = look()
        if seen.status in states:
            return seen
        if time.monotonic() > until or seen.status in ("failed", "cancelled", "expired"):
            raise SystemExit(f"waited for {states}: {seen}")
        time.sleep(0.05)


def batches():
    def line(i):
        body = {"messages": [{"role": "user", "content": f"Hello {i}"}], "max_tokens": 8}
        return json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})

    content = "\n".join(map(line, range(5))) + "\n"
    file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    assert file.bytes == len(content)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    done = wait(lambda: client.batches.retrieve(batch.id), ("completed",))
    assert (done.request_counts.completed, done.request_counts.failed) == (5, 0), done
    results = [json.loads(r) for r in client.files.content(done.output_file_id).text.splitlines()]
    assert {r["custom_id"] for r in results} == {f"c{i}" for i in range(5)}
    assert batch.id in [b.id for b in client.batches.list()]
    client.files.delete(file.id)


for part in (tools, structured, logprobs, responses, background, batches):
    part()
    print(part.__name__, "ok")
