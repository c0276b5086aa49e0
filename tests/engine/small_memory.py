"""A network with little memory, for tests of what an engine does about that."""

from __future__ import annotations

from tests.engine.laws import MODEL


class SmallMemory:
    """A network that runs out of memory with more than so many rows."""

    def __init__(self, max_prefill: int, max_decode: int) -> None:
        self.max_rows = {True: max_prefill, False: max_decode}
        self.spec, self.image_token_id = MODEL.spec, MODEL.image_token_id
        self.encode_images = MODEL.encode_images

    def next_logits(self, ids, features, positions, mask, kv):  # type: ignore[no-untyped-def]
        # A prompt of one token alone looks like a decode step; these examples have none.
        logits = MODEL.next_logits(ids, features, positions, mask, kv)
        if len(ids) > self.max_rows[ids.shape[1] > 1]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return logits
