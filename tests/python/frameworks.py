"""LangChain's ChatOpenAI and LiteLLM against a running ernied: frameworks.py http://127.0.0.1:PORT"""

import os
import sys

# LiteLLM would fetch a price list at import.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import langchain_openai
import litellm
import pydantic

base = sys.argv[1] + "/v1"


class Verdict(pydantic.BaseModel):
    """A verdict."""

    # A model this small goes on and on where a schema lets it.
    model_config = pydantic.ConfigDict(extra="forbid")
    certain: bool


def langchain():
    chat = langchain_openai.ChatOpenAI(base_url=base, api_key="none", model="ernie-demo", temperature=0, max_tokens=128)
    answer = chat.invoke("Hello")
    assert answer.content and answer.usage_metadata["total_tokens"] > 0, answer
    assert "".join(piece.content for piece in chat.stream("Hello")) == answer.content
    assert len(chat.batch(["Hello", "你好"])) == 2
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Verdict, method=method).invoke("Hello"), Verdict), method
    called = chat.bind_tools([Verdict], tool_choice="required").invoke("Hello")
    assert called.tool_calls[0]["name"] == "Verdict", called
    try:
        chat.invoke("word " * 30000)
        raise SystemExit("a prompt over the context was accepted")
    except Exception as error:  # LangChain has a type of its own for it since 1.1
        assert "maximum context length" in str(error), error


def lite():
    ask = {"model": "openai/ernie-demo", "api_base": base, "api_key": "none", "messages": [{"role": "user", "content": "Hello"}]}
    answer = litellm.completion(**ask, temperature=0, max_tokens=64)
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens > 0, answer
    streamed = "".join(c.choices[0].delta.content or "" for c in litellm.completion(**ask, temperature=0, max_tokens=64, stream=True))
    assert streamed == text, (streamed, text)
    try:
        litellm.completion(**{**ask, "messages": [{"role": "user", "content": "word " * 30000}]})
        raise SystemExit("a prompt over the context was accepted")
    except litellm.ContextWindowExceededError:
        pass


for part in (langchain, lite):
    part()
    print(part.__name__, "ok")
