"""The official Anthropic client against a running ernied: anthropic_client.py http://127.0.0.1:PORT"""

import sys

import anthropic

url = sys.argv[1]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
model = "ernie-demo"
greedy = {"temperature": 0}  # newer clients leave it to the body
question = [{"role": "user", "content": "Hello"}]

whole = client.messages.create(model=model, max_tokens=128, extra_body=greedy, messages=question)
text = "".join(block.text for block in whole.content if block.type == "text")
assert text and whole.role == "assistant" and whole.stop_reason == "end_turn", whole
assert whole.usage.input_tokens > 0 and whole.usage.output_tokens > 0

with client.messages.stream(model=model, max_tokens=128, extra_body=greedy, messages=question) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
assert streamed == text, (streamed, text)
assert final.usage.output_tokens == whole.usage.output_tokens

kinds = [event.type for event in client.messages.create(
    model=model, max_tokens=16, extra_body=greedy, messages=question, stream=True)]
assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds, kinds

counted = client.messages.count_tokens(model=model, messages=question)
assert counted.input_tokens == whole.usage.input_tokens, (counted, whole.usage)

short = client.messages.create(model=model, max_tokens=2, messages=question, system="Be brief.")
assert short.stop_reason == "max_tokens", short

stopped = client.messages.create(model=model, max_tokens=128, extra_body=greedy, messages=question, stop_sequences=[text[4:8]])
assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == text[4:8], stopped

tool = {"name": "get_time", "description": "The time", "input_schema": {
    "type": "object", "properties": {"zone": {"enum": ["UTC", "CST"]}}, "required": ["zone"], "additionalProperties": False}}
called = client.messages.create(
    model=model, max_tokens=128, extra_body=greedy, messages=question, tools=[tool], tool_choice={"type": "any"})
use = next(block for block in called.content if block.type == "tool_use")
assert called.stop_reason == "tool_use" and use.name == "get_time" and use.input["zone"] in ("UTC", "CST"), called
client.messages.create(model=model, max_tokens=8, tools=[tool], messages=question + [
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "12:00"}]}])

for wrong in ({"model": "no-such-model"}, {"extra_body": {"temperature": 9}}):
    try:
        client.messages.create(**{"model": model, "max_tokens": 8, "messages": question, **wrong})
        raise SystemExit(f"{wrong} was accepted")
    except (anthropic.NotFoundError, anthropic.BadRequestError) as error:
        assert error.body["type"] == "error" and error.body["error"]["type"].endswith("_error"), error.body
print("ok")
