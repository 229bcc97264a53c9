"""Renders cases.json with jinja2, set up as transformers sets it up, into expected.json."""

import datetime
import json
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).parent
NOW = datetime.datetime(2026, 3, 9, 14, 5, 7)


class Generation(jinja2.ext.Extension):
    """`{% generation %}` renders as its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def main() -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = NOW.strftime
    expected = {}
    for case in json.loads((HERE / "cases.json").read_text(encoding="utf-8")):
        template = environment.from_string((HERE / f"{case['template']}.jinja").read_text(encoding="utf-8"))
        expected[case["name"]] = template.render(
            messages=case["messages"],
            tools=case.get("tools"),
            documents=None,
            add_generation_prompt=case["add_generation_prompt"],
            **case.get("variables", {}),
        )
    text = json.dumps(expected, indent=2, ensure_ascii=False) + "\n"
    (HERE / "expected.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
