"""Control tokens that clients spell in their texts: they stay text, and end no message.

A conversation becomes one text, in which a tokenizer cannot tell ``<|im_end|>`` of the chat
template from the same letters in a message. So these letters are parted in messages, by a number
that nobody can guess, before the template is rendered. What is whole in the rendered text is the
template's own, and gets another name, which only a second tokenizer knows. To this one the letters
of messages, together again, are a text like others. Both tokenizers share vocabulary and rules.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from kvrelay.text.encoding import encode

_PIECE_CHARACTERS: Final = 64 << 10
"""A search holds the interpreter's lock: it looks at no more of a text at once."""
_DIGITS: Final = 20
_LEAST_CHARACTERS: Final = 2
"""A token of one character cannot be parted."""
_Tree = dict[str, Any]


class ControlTokens:
    """The control tokens of a tokenizer and a chat template.

    These are the tokenizer's special tokens, and others that are added to its vocabulary and that
    the template writes, such as ``<tool_call>``. White space is none, as some vocabularies have it
    for code and templates for their own layout.

    Args:
        tokenizer: the model's.
        template: the source of the chat template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        added = tokenizer.get_added_tokens_decoder()
        long = [one for one in added.values() if len(one.content.strip()) >= _LEAST_CHARACTERS]
        special = [one.content for one in long if one.special]
        written = [one.content for one in long if not one.special and one.content in template]
        self._everywhere = _Parting([*special, *written])
        self._special = frozenset(special)
        self._in_models_own: dict[frozenset[str], _Parting] = {}
        self._names = _Finder([*special, *written])
        self._mark = _number()
        self._tokenizer, self._ids = _renamed(tokenizer, added, {*special, *written}, self._mark)
        self.stay_text = self._parts_all(tokenizer, [*special, *written])
        """Whether the tokenizer can make text of all of them; some make words of whole ones."""

    def hide(
        self, conversation: Mapping[str, Any], said: Sequence[str]
    ) -> PartedConversation | None:
        """Part control tokens in what clients have written; None: there are none.

        The model's own messages may have the tags of its reasoning and of its calls, which it has
        written as tokens.

        Args:
            conversation: the arguments of a template that come from a client, with `messages`.
            said: the tags of reasoning.
        """
        wanted = self._special.difference(said)
        of_model = self._in_models_own.get(wanted)
        if of_model is None:
            of_model = self._in_models_own[wanted] = _Parting(wanted)
        hiding = _Hiding(self._everywhere, of_model)
        hidden = hiding.conversation(conversation)
        return PartedConversation(self, hidden, hiding.number) if hiding.has_parted else None

    def encode(
        self, text: str, number: str, most_tokens: int, *, add_special_tokens: bool
    ) -> Sequence[int]:
        """Tokenize a rendered text in which letters are parted by `number`, as `encode` does."""
        named = self._names.insert(text, self._mark).replace(number, "")
        ids = encode(self._tokenizer, named, most_tokens, add_special_tokens=add_special_tokens)
        return [self._ids.get(token_id, token_id) for token_id in ids]

    def _parts_all(self, tokenizer: Tokenizer, contents: Sequence[str]) -> bool:
        control = {tokenizer.token_to_id(content) for content in contents}
        encoded = self._tokenizer.encode_batch_fast(list(contents), add_special_tokens=False)
        return all(control.isdisjoint(map(self._own_id, one.ids)) for one in encoded)

    def _own_id(self, token_id: int) -> int:
        return self._ids.get(token_id, token_id)


class PartedConversation:
    """A conversation whose control tokens are parted.

    Args:
        control: the control tokens.
        conversation: the arguments of a template.
        number: the number that parts the letters.
    """

    def __init__(self, control: ControlTokens, conversation: dict[str, Any], number: str) -> None:
        self._control = control
        self.conversation = conversation
        self._number = number

    def shown(self, text: str) -> str:
        """Return a text with the letters as the client has written them."""
        return text.replace(self._number, "")

    def encode(self, text: str, most_tokens: int, *, add_special_tokens: bool) -> Sequence[int]:
        """Tokenize the rendered text; arguments and errors are those of `encode`."""
        return self._control.encode(
            text, self._number, most_tokens, add_special_tokens=add_special_tokens
        )


class _Hiding:
    """The parting of all texts of a conversation.

    Args:
        everywhere: parts control tokens.
        of_model: parts those that the model's own messages must not have.
    """

    def __init__(self, everywhere: _Parting, of_model: _Parting) -> None:
        self._everywhere = everywhere
        self._of_model = of_model
        self.number = _number()
        self.has_parted = False

    def conversation(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a template, parted."""
        hidden = {name: self._value(value, self._everywhere) for name, value in given.items()}
        return {**hidden, "messages": [self._message(one) for one in given["messages"]]}

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        own = self._of_model if message.get("role") == "assistant" else self._everywhere
        return {
            self._text(name, self._everywhere): self._value(
                value, self._everywhere if name == "tool_calls" else own
            )
            for name, value in message.items()
        }

    def _value(self, value: Any, parting: _Parting) -> Any:
        """Return a value of JSON, parted; objects and lists keep their types."""
        if isinstance(value, str):
            return self._text(value, parting)
        if isinstance(value, dict):
            members = [
                (self._text(name, parting), self._value(one, parting))
                for name, one in value.items()
            ]
            return type(value)(members)
        if isinstance(value, list):
            return [self._value(one, parting) for one in value]
        return value

    def _text(self, text: str, parting: _Parting) -> str:
        parted = parting.insert(text, self.number)
        self.has_parted = self.has_parted or parted is not text
        return parted


class _Finder:
    """A finder of some words in a text: the first, and of several at a place the longest."""

    def __init__(self, words: Iterable[str]) -> None:
        tree = _tree(words)
        self._longest = max(map(len, words), default=0)
        self._first = "".join(tree)
        self._pattern = re.compile(_longest_of(tree)) if tree else None

    def insert(self, text: str, mark: str) -> str:
        """Return the text with a mark at the places; the same object if there are none."""
        if self._pattern is None or not any(one in text for one in self._first):
            return text
        parts, begin = [], 0
        for place in self._places(text, self._pattern):
            parts += [text[begin:place], mark]
            begin = place
        return "".join([*parts, text[begin:]]) if parts else text

    def _places(self, text: str, pattern: re.Pattern[str]) -> Iterator[int]:
        end = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            stop = start + _PIECE_CHARACTERS
            for match in pattern.finditer(text, max(start, end), stop + self._longest):
                if match.start() >= stop:
                    break
                end = match.end()
                yield self._place_of(match)

    def _place_of(self, match: re.Match[str]) -> int:
        return match.start()


class _Parting(_Finder):
    """A finder of the first letters of words, also of one that only begins at a text's end.

    A mark behind each of them leaves no such word whole, whatever follows the text.
    """

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__(words)
        tree = _tree(words)
        if tree:
            one_letter = [f"{re.escape(a)}(?={_begun(after)})" for a, after in tree.items()]
            self._pattern = re.compile("|".join(one_letter))

    def _place_of(self, match: re.Match[str]) -> int:
        return match.end()


def _tree(words: Iterable[str]) -> _Tree:
    """Return words as a tree of letters, in which an empty letter ends a word."""
    tree: _Tree = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return tree


def _longest_of(tree: _Tree) -> str:
    """Return an expression of the longest word of a tree."""
    letters = [re.escape(one) + _longest_of(after) for one, after in tree.items() if one]
    if not letters:
        return ""
    return f"(?:{'|'.join(letters)}){'?' if '' in tree else ''}"


def _begun(tree: _Tree) -> str:
    """Return an expression of any word of a tree, or of the beginning of one at the end."""
    if "" in tree:
        return ""
    return f"(?:{'|'.join([re.escape(a) + _begun(after) for a, after in tree.items()])}|\\Z)"


def _renamed(
    tokenizer: Tokenizer, added: Mapping[int, AddedToken], names: set[str], mark: str
) -> tuple[Tokenizer, dict[int, int]]:
    """Make a tokenizer that knows some added tokens by other names; vocabularies are shared.

    Returns:
        the tokenizer, and the ids of added tokens by those that it gives them.
    """
    other = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (same := getattr(tokenizer, part)) is not None:
            setattr(other, part, same)
    # No id of an added token may be another's of the first one, which the post-processor has.
    unused = max(added, default=0) + 1 - other.get_vocab_size()
    other.add_tokens([AddedToken(f"{mark}.{number}.") for number in range(unused)])
    own = {
        token_id: (mark if token.content in names else "") + token.content
        for token_id, token in added.items()
    }
    other.add_tokens(
        [
            AddedToken(
                own[token_id],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for token_id, token in added.items()
        ]
    )
    given = {other.token_to_id(name): token_id for token_id, name in own.items()}
    return other, {new: old for new, old in given.items() if new is not None}


def _number() -> str:
    """Return digits that nobody can guess: no template changes them, as it may other letters."""
    return "".join(secrets.choice("0123456789") for _ in range(_DIGITS))
