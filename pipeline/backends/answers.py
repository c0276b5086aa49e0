"""From a sequence that ended to the caption that the job gets, the same for every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.captioner import SamplingSettings
from pipeline.engine.sequence import Sequence as EngineSequence
from pipeline.engine.stopping import StopRules
from pipeline.records import Caption

# The longest run of tokens that can stand for less than a character: the bytes of one.
_BYTES_OF_A_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Answers:
    """How a network's ids become text, and which ids and strings end it."""

    detokenise: Callable[[Sequence[int]], str]
    eos_ids: frozenset[int]
    stop: tuple[str, ...]

    def rules(self, sampling: SamplingSettings) -> StopRules:
        """Return when a sequence of a job ends."""
        return StopRules(
            eos_ids=self.eos_ids,
            max_new_tokens=sampling.max_new_tokens,
            max_repeats=sampling.max_repeats,
            has_stop_text=self._has_stop_text if self.stop else None,
        )

    def caption(self, ended: EngineSequence, num_prompt_tokens: int) -> Caption:
        """Make the caption of a sequence that ended, by itself or in an error."""
        if ended.error is not None:
            return Caption(
                ended.request,
                ended.caption_index,
                num_prompt_tokens=num_prompt_tokens,
                error=ended.error.code,
                error_detail=ended.error.detail,
            )
        return Caption(
            ended.request,
            ended.caption_index,
            text=self.text(ended.token_ids),
            finish_reason=ended.finish_reason,
            num_prompt_tokens=num_prompt_tokens,
            num_caption_tokens=len(ended.token_ids),
            mean_logprob=ended.mean_logprob,
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """Detokenise a caption: cut at the first stop string, blanks at the ends dropped."""
        text = self.detokenise([token for token in token_ids if token not in self.eos_ids])
        places = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return text[: min(places)].strip() if places else text.strip()

    def _has_stop_text(self, token_ids: Sequence[int]) -> bool:
        # A stop string can begin in an earlier token; each token adds a character or more,
        # byte pieces of one character aside, so this tail is long enough to see the whole.
        longest = max(len(stop.encode()) for stop in self.stop)
        text = self.detokenise(token_ids[-(longest + _BYTES_OF_A_CHARACTER) :])
        return any(stop in text for stop in self.stop)
