"""The tools of a Responses body, as the functions of a chat, and their calls under their own names.

A `custom` tool, whose input is any text, is a function with one argument. The tools of a namespace
are functions with its name before theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvrelay.router.errors import InvalidField

INPUT: Final = "input"
"""The argument that a custom tool's input is in a chat."""
_MOST_NAME: Final = 64
_DESCRIBED: Final = ("name", "description", "parameters", "strict")
_SYNTAXES: Final = ("lark", "regex")
_CALLED: Final = ("function", "custom")


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool as its client knows it."""

    name: str
    namespace: str = ""
    is_custom: bool = False
    """Whether its input is a text, not JSON."""


@dataclass(slots=True)
class ResponseTools:
    """The tools of one body."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """The tools as a chat has them."""
    places: list[str] = field(default_factory=list)
    """The places in the body of these functions."""
    called: dict[str, CalledTool] = field(default_factory=dict)
    """The tools by the names that they have in the chat."""
    served: list[Mapping[str, Any]] = field(default_factory=list)
    """The tools as they came, without those that are left out."""
    left_out: list[str] = field(default_factory=list)
    """The types of the tools that only the vendor runs."""
    choice: str | dict[str, Any] | None = None
    """The chat's `tool_choice`."""

    @classmethod
    def read(cls, tools: Sequence[Any], choice: Any) -> ResponseTools:
        """Read `tools` and `tool_choice`; raise `InvalidField`."""
        read = cls()
        for number, tool in enumerate(tools):
            read._add(tool, f"tools[{number}]")
        read._choose(choice)
        return read

    def told_as(self, name: str) -> CalledTool:
        """Return the tool that a call in the chat names; unknown ones are functions."""
        return self.called.get(name) or CalledTool(name)

    def _add(self, tool: Any, place: str) -> None:
        kind = _member(tool, "type", place)
        if kind == "namespace":
            namespace, inner = _member(tool, "name", place), tool.get("tools")
            if not isinstance(inner, list):
                raise InvalidField(f"{place}.tools", "must be a list")
            for number, one in enumerate(inner):
                within = f"{place}.tools[{number}]"
                if not self._add_function(one, within, namespace):
                    self.left_out.append(_member(one, "type", within))
            self.served.append(tool)
        elif self._add_function(tool, place, ""):
            self.served.append(tool)
        else:
            self.left_out.append(kind)

    def _add_function(self, tool: Any, place: str, namespace: str) -> bool:
        """Add a tool that the client runs; return whether it is one."""
        kind = _member(tool, "type", place)
        if kind not in _CALLED:
            return False
        own = _member(tool, "name", place)
        name, is_custom = flat_name(own, namespace), kind == "custom"
        described = _custom_function(tool, place) if is_custom else tool
        function = {
            member: described[member] for member in _DESCRIBED if described.get(member) is not None
        }
        self.functions.append({"type": "function", "function": {**function, "name": name}})
        self.places.append(place)
        self.called[name] = CalledTool(own, namespace, is_custom)
        return True

    def _choose(self, choice: Any) -> None:
        """Read `tool_choice`, and leave out the functions that it does not allow."""
        if choice is None or isinstance(choice, str):
            self.choice = choice
            return
        kind = _member(choice, "type", "tool_choice")
        if kind == "allowed_tools":
            self._allow(choice)
        elif kind in _CALLED:
            self.choice = {"type": "function", "function": {"name": self._chosen(choice)}}
        else:
            what = f"cannot be {kind[:64]}, which is a tool that only its vendor runs"
            raise InvalidField("tool_choice", what)

    def _allow(self, choice: Mapping[str, Any]) -> None:
        mode, allowed = choice.get("mode"), choice.get("tools")
        if mode not in ("auto", "required"):
            raise InvalidField("tool_choice.mode", 'must be "auto" or "required"')
        if not isinstance(allowed, list):
            raise InvalidField("tool_choice.tools", "must be a list")
        names = set(self._allowed(allowed))
        kept = [n for n, one in enumerate(self.functions) if one["function"]["name"] in names]
        self.functions = [self.functions[number] for number in kept]
        self.places = [self.places[number] for number in kept]
        self.choice = mode

    def _allowed(self, allowed: Sequence[Any]) -> Iterator[str]:
        for number, one in enumerate(allowed):
            place = f"tool_choice.tools[{number}]"
            if _member(one, "type", place) in _CALLED:
                yield self._chosen(one, place)

    def _chosen(self, choice: Mapping[str, Any], place: str = "tool_choice") -> str:
        """Return the name in the chat of a tool that `tool_choice` names."""
        namespace = choice.get("namespace")
        own = _member(choice, "name", place)
        name = flat_name(own, namespace if isinstance(namespace, str) else "")
        if name not in self.called:
            raise InvalidField(f"{place}.name", f"{own[:64]!r} is no tool of this call")
        return name


def flat_name(name: str, namespace: str) -> str:
    """Return the name in a chat of a tool in a namespace, which may be empty."""
    if not namespace:
        return name
    flat = f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"
    return flat if len(flat) <= _MOST_NAME else name


def _custom_function(tool: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Return a custom tool as a function; a grammar of its input is told to the model."""
    given = tool.get("format") or {"type": "text"}
    kind = _member(given, "type", f"{place}.format")
    schema: dict[str, Any] = {"type": "string"}
    about = tool.get("description")
    if kind == "grammar":
        syntax = _member(given, "syntax", f"{place}.format")
        definition = _member(given, "definition", f"{place}.format")
        if syntax not in _SYNTAXES:
            raise InvalidField(f"{place}.format.syntax", f"must be {' or '.join(_SYNTAXES)}")
        if syntax == "regex":
            schema["pattern"] = f"^(?:{definition})$"
        said = [about] if isinstance(about, str) else []
        about = "\n\n".join([*said, f"The {INPUT} must match this {syntax}:\n{definition}"])
    elif kind != "text":
        raise InvalidField(f"{place}.format.type", 'must be "text" or "grammar"')
    parameters = {
        "type": "object",
        "properties": {INPUT: schema},
        "required": [INPUT],
        "additionalProperties": False,
    }
    is_strict = True if "pattern" in schema else None
    return {"description": about, "parameters": parameters, "strict": is_strict}


def _member(given: Any, name: str, place: str) -> str:
    """Return a member of an object that must be a text."""
    if not isinstance(given, dict):
        raise InvalidField(place, "must be an object")
    if given.get(name) is None:
        raise InvalidField(f"{place}.{name}", "is missing")
    if not isinstance(given[name], str):
        raise InvalidField(f"{place}.{name}", "must be a string")
    return str(given[name])
