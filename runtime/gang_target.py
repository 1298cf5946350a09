"""A target whose layers run in a gang: embedding, head and drafter stay here, hidden states and features come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layouts.arguments import ChildEnvironment
from runtime.attention import Step
from runtime.gang import Gang, RankSpec, RoundsSpec, new_folder
from runtime.gang_step import RemotePool, from_bytes, pack
from runtime.linear import Linear, LinearFactory
from runtime.models import Checkpoint
from runtime.native_layouts import RANKS, label
from runtime.target import TargetModel, hf_config

if TYPE_CHECKING:
    from runtime.gang_rounds import GangDevice


class GangDecoder:
    """The decoder's layers over all ranks, behind the same call as those in one process."""

    def __init__(
        self, gang: Gang, answers: int, width: int, embedding: Tensor, head: Linear, taps: int
    ) -> None:
        """`answers`: the rank that sends back; `taps`: how many layers' outputs come with the hidden states."""
        self.gang = gang
        self.embedding = embedding
        self.head = head
        self._answers, self._width, self._taps = answers, width, taps

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """As `FusedDecoder.forward`; raises EngineLost."""
        assert isinstance(step.pool, RemotePool)
        message = pack(token_ids, positions, step.segments, step.pool.take_moves())
        data = self.gang.forward(message, self._answers)
        both = from_bytes(data, self.embedding.dtype, (1 + self._taps) * self._width, self.embedding.device)
        return both[:, : self._width], both[:, self._width :] if self._taps else None


class GangTarget(TargetModel):
    """`TargetModel` over child processes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: str,
        *,
        slots: int,
        taps: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFactory,
        linear_setting: str,
        draft_linear: LinearFactory | None,
        threads: int,
        tick: Callable[[], object],
        variables: ChildEnvironment | None = None,
        rounds: RoundsSpec | None = None,
    ) -> None:
        """Starts the ranks of `layout`, each with `slots` KV slots; `tick` is called meanwhile and may raise.

        `variables` are set in the ranks alone; with `rounds` they play whole rounds (`tp2`, dense targets). Raises
        EngineLost: a rank did not come up.
        """
        self.device, self.dtype = device, dtype
        _, self.config = hf_config(checkpoint)
        self.vocab_size = int(self.config.vocab_size)
        own = ("model.embed_tokens.weight", "lm_head.weight")
        state = {
            name: value.to(device, dtype) for name, value in checkpoint.load_state(own.__contains__).items()
        }
        embedding = state[own[0]]
        head = state.get(own[1], embedding)
        self._add_heads(state, linear, draft_linear)
        folder = new_folder()
        given = tuple(variables.set.items()) if variables is not None else ()
        anew = variables is not None and bool(variables.needs_new_process)
        specs = [
            RankSpec(
                rank=rank,
                layout=layout,
                folder=folder,
                model=str(checkpoint.path),
                dtype=str(dtype).removeprefix("torch."),
                device="cpu" if device.type == "cpu" else f"cuda:{rank}",
                slots=slots,
                taps=taps,
                linear=linear_setting,
                threads=max(1, threads // RANKS),
                variables=given,
                rounds=rounds,
            )
            for rank in range(RANKS)
        ]
        gang = Gang(specs, tick, anew)
        self.gang = gang
        answers = RANKS - 1 if layout == "pp2" else 0
        width = int(self.config.hidden_size)
        self.decoder = GangDecoder(gang, answers, width, embedding, linear(head), len(taps))
        self.pool = RemotePool(torch.device("cpu"))
        self.words = _words(layout, checkpoint, gang)
        self.rounds: GangDevice | None = None
        """Plays rounds on the ranks; None where they only run forward passes."""
        if rounds is not None:
            from runtime.gang_rounds import GangDevice  # Triton is not on every machine
            from runtime.gpu_round import prefill_sizes

            block = rounds.block_size if rounds.drafter is not None else 1
            self.rounds = GangDevice(gang, self.pool, block, prefill_sizes(rounds.max_batch))

    def watch(self, on_lost: Callable[[str], object]) -> None:
        self.gang.watch(on_lost)

    def close(self) -> None:
        """Ends the ranks."""
        self.gang.close()


def _words(layout: str, checkpoint: Checkpoint, gang: Gang) -> str:
    """The layout with what is really split, which may be less than its name says."""
    name = label(layout, checkpoint.config)
    if layout == "pp2":
        return f"{name}: {RANKS} processes, half of the layers each, one works while the other waits"
    split = RANKS * (gang.whole - gang.held[0]) / (RANKS - 1) / gang.whole
    return f"{name}: {RANKS} processes, {split:.0%} of the weights split"
