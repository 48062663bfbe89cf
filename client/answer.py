"""A whole answer, collected from a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Output:
    """One of a request's outputs."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    """One for each token, if the request asked for them."""


@dataclass(slots=True)
class Answer:
    """The whole answer to a request: its outputs and its completion."""

    request_id: str = ""
    outputs: list[Output] = field(default_factory=list)
    """One for each choice."""
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    """One for each token of the prompt but the first, if the request asked for them."""
    complete: pb.GenerateComplete = field(default_factory=pb.GenerateComplete)
    """How the request ended, and the tokens it took."""

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> Sequence[int]:
        """The token ids of the first output."""
        return self.outputs[0].token_ids

    def take(self, response: pb.GenerateResponse) -> None:
        """Add the next event of the stream."""
        self.request_id = response.request_id
        if response.HasField("complete"):
            self.complete = response.complete
            self._output(max(len(response.complete.choices), 1) - 1)
            return
        delta = response.delta
        output = self._output(delta.choice)
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs

    def _output(self, choice: int) -> Output:
        while len(self.outputs) <= choice:
            self.outputs.append(Output())
        return self.outputs[choice]
