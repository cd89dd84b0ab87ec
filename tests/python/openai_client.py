"""The official OpenAI client against a running ernied: openai_client.py http://127.0.0.1:PORT"""

import sys

import openai

url = sys.argv[1]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)

model = client.models.list().data[0].id
assert model == "ernie-demo", model
assert client.models.retrieve(model).id == model

question = [{"role": "user", "content": "请用一句话介绍人工智能"}]
whole = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=256)
text = whole.choices[0].message.content
assert text and whole.choices[0].finish_reason == "stop", whole
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

streamed, usage = "", None
with client.chat.completions.create(
    model=model, messages=question, temperature=0, max_tokens=256, stream=True, stream_options={"include_usage": True}
) as stream:
    for chunk in stream:
        if chunk.choices:
            streamed += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
assert streamed == text, (streamed, text)
assert usage.completion_tokens == whole.usage.completion_tokens

scored = client.chat.completions.create(
    model=model, messages=question, temperature=0, max_tokens=256, logprobs=True, top_logprobs=3
)
spelled = b"".join(bytes(t.bytes) for t in scored.choices[0].logprobs.content).decode()
assert spelled.startswith(text), (spelled, text)

completion = client.completions.create(model=model, prompt="User: Hello\nAssistant: ", max_tokens=16, temperature=0)
assert completion.object == "text_completion" and completion.choices[0].text

several = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Hello"}], n=3, seed=7, temperature=1.2, max_tokens=24
)
assert [c.index for c in several.choices] == [0, 1, 2]

try:
    client.chat.completions.create(model="no-such-model", messages=question)
    raise SystemExit("an unknown model was accepted")
except openai.NotFoundError as error:
    assert "no-such-model" in str(error)

try:
    client.chat.completions.create(model=model, messages=question, temperature=9)
    raise SystemExit("a temperature of 9 was accepted")
except openai.BadRequestError as error:
    assert error.param == "temperature", error.body
print("ok")
