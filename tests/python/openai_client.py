"""The everyday calls of the official `openai` client against a running endpoint.

    python tests/python/openai_client.py http://127.0.0.1:8080/v1

Prints one line a check and exits with 1 on the first that fails.
"""

import json
import sys

import openai
from openai import OpenAI

MODEL = "hearth-demo"
QUESTION = [{"role": "user", "content": "What is Hearth?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bonn", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def models(client):
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert "Hearth" in answer.choices[0].message.content, answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    return answer.choices[0].message.content


def chat_stream(client):
    whole = chat(client)
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, reason, usage = "", None, None
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        usage = chunk.usage or usage
    assert text == whole, (text, whole)
    assert reason == "stop" and usage.completion_tokens > 0


def several_choices(client):
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, temperature=1.5, seed=5, max_tokens=20)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    again = client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, temperature=1.5, seed=5, max_tokens=20)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]


def stop_and_length(client):
    short = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=3)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3
    whole = chat(client)
    word = whole.split()[2]
    stopped = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == whole[: whole.index(word)]


def logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    for token in content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.token == token.top_logprobs[0].token, "greedy takes the likeliest"


def completions(client):
    answer = client.completions.create(model=MODEL, prompt="Hearth is", max_tokens=8, temperature=0)
    assert answer.choices[0].text and answer.usage.completion_tokens <= 8
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt="Hearth is", max_tokens=8, temperature=0, stream=True)
        if chunk.choices
    )
    assert text == answer.choices[0].text
    two = client.completions.create(model=MODEL, prompt=["Hearth is", "Kubernetes is"], max_tokens=4, temperature=0)
    assert len(two.choices) == 2


def structured(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=200,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "node",
                "strict": True,
                "schema": {
                    "type": "object",
                    "properties": {"role": {"enum": ["prefill", "decode"]}, "cores": {"type": "integer", "minimum": 1, "maximum": 9}},
                    "required": ["role", "cores"],
                    "additionalProperties": False,
                },
            },
        },
    )
    value = json.loads(answer.choices[0].message.content)
    assert value["role"] in ("prefill", "decode") and 1 <= value["cores"] <= 9, value


def tools(client):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=200
        )
        call = answer.choices[0].message.tool_calls[0]
        assert answer.choices[0].finish_reason == "tool_calls", answer
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Bonn", "Rome"), call
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=200, stream=True
    )
    name, arguments = "", ""
    for chunk in stream:
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "get_weather" and json.loads(arguments)["city"] in ("Bonn", "Rome"), (name, arguments)


def refusals(client):
    cases = [
        (openai.NotFoundError, dict(model="no-such-model", messages=QUESTION), MODEL),
        (openai.BadRequestError, dict(model=MODEL, messages=QUESTION, temperature=9), "temperature"),
        (openai.BadRequestError, dict(model=MODEL, messages=QUESTION, max_tokens=0), "max_tokens"),
        (openai.BadRequestError, dict(model=MODEL, messages=QUESTION, extra_body={"frobnicate": 1}), "frobnicate"),
        (openai.BadRequestError, dict(model=MODEL, messages=[]), "messages"),
        (openai.BadRequestError, dict(model=MODEL, messages=[{"role": "user", "content": "word " * 20000}]), "context"),
    ]
    for kind, arguments, expected in cases:
        try:
            client.chat.completions.create(**arguments)
        except kind as error:
            assert expected in str(error), (expected, str(error))
        else:
            raise AssertionError(f"{expected} was not refused")


def sampling(client):
    greedy = chat(client)
    for arguments in (
        dict(temperature=1.0, top_p=0.000001),
        dict(temperature=1.0, extra_body={"top_k": 1}),
        dict(temperature=1.0, extra_body={"min_p": 1.0}),
    ):
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, **arguments)
        assert answer.choices[0].message.content == greedy, arguments


def token_after(client, prompt, **arguments):
    """The one token that follows a prompt of tokens greedily, and its text."""
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=1, temperature=0, logprobs=1, **arguments
    )
    return answer.choices[0].logprobs.tokens[0]


def token_ids(client, text):
    """The tokens whose text is `text`: each token is the prompt alone and echoed, so that its text is seen."""
    ids = []
    for first in range(0, VOCABULARY, 64):
        prompts = [[token] for token in range(first, min(first + 64, VOCABULARY))]
        answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=1, temperature=0, echo=True, logprobs=0)
        for choice in answer.choices:
            if choice.logprobs.tokens[0] == text:
                ids.append(prompts[choice.index][0])
    return ids


def conversation(client):
    first = chat(client)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Answer briefly."},
            *QUESTION,
            {"role": "assistant", "content": first},
            {"role": "user", "content": [{"type": "text", "text": "What is a KV cache?"}]},
        ],
        temperature=0,
        max_tokens=60,
    )
    assert answer.choices[0].message.content


CHECKS = [models, chat, chat_stream, several_choices, stop_and_length, logprobs, completions, structured, tools, refusals, sampling, conversation]


def main():
    client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
    for check in CHECKS:
        check(client)
        print(f"ok {check.__name__}", flush=True)
    print(f"{len(CHECKS)} checks hold for openai {openai.__version__}")


if __name__ == "__main__":
    main()
