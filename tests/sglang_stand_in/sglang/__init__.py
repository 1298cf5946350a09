"""A stand-in for SGLang with the few names the adapter's child uses; tokens come from a formula, all else is real.

It lets the adapter (processes, pipe, streams, cancelling, losses) be tested in seconds and anywhere; what SGLang itself
does is tested in its own environment.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

from runtime.sglang_plugin import BUDGET
from runtime.sglang_trees import PLACE, TreeSampler

__version__ = "0.5.18"
STEP_S = 0.004


def token_after(ids):
    """What the "model" chooses after `ids`."""
    return (7 * ids[-1] + 3 * len(ids) + 11) % 256


class Engine:
    """Like `sglang.Engine` as far as the child knows it; its "scheduler" is a process that does nothing."""

    def __init__(self, **arguments):
        if arguments.get("model_path", "").endswith("unloadable"):
            raise RuntimeError("the weights cannot be read")
        self.loop = asyncio.new_event_loop()
        self._width = arguments.get("speculative_num_draft_tokens", 1)
        self._slots = arguments.get("max_total_tokens")
        self._aborted = set()
        self._trees = TreeSampler(os.environ[PLACE])
        self.tokenizer_manager = self
        scheduler = "import time\nwhile True: time.sleep(60)  # scheduler"
        self._scheduler = subprocess.Popen([sys.executable, "-c", scheduler])
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        code = self._scheduler.wait()
        print(f"Subprocess scheduler_0 crashed with exit code {code}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def get_server_info(self):
        return {"max_total_num_tokens": self._slots}

    def get_all_child_pids(self):
        return [self._scheduler.pid]

    async def set_internal_state(self, asked):
        """Takes a tree budget, as the plugin's hook in the scheduler does."""
        return [asked.server_args == {BUDGET: 9}]

    def abort_request(self, rid):
        self._aborted.add(rid)

    def _sample(self, ids, rid):
        """Hands the round after `ids` to what samples them: a chain of two, accepted, and a sibling of its first."""
        if not self._trees.looked_at():
            return
        import torch

        text = list(ids)
        for _ in range(3):
            text.append(token_after(text))
        emitted = text[len(ids) :]
        nodes = [ids[-1], *emitted[:2], (emitted[0] + 1) % 256]
        tree = SimpleNamespace(
            token_ids=torch.tensor([nodes]),
            parents=torch.tensor([[0, 0, 1, 0]]),
            depths=torch.tensor([[0, 1, 2, 1]]),
            log_probs=torch.tensor([[0.0, -0.5, -1.0, -2.0]]),
        )
        accepted = SimpleNamespace(
            lengths=torch.tensor([3], dtype=torch.int32),
            path=torch.tensor([[0, 1, 2]]),
            token_ids=torch.tensor([emitted]),
        )
        self._trees.step([SimpleNamespace(rid=rid)], torch.tensor([len(ids) - 1]), tree, accepted, 4)

    async def async_generate(self, input_ids, sampling_params, stream, rid):
        assert stream
        return self._tokens(list(input_ids), sampling_params, rid)

    async def _tokens(self, ids, sampling, rid):
        prompt, rounds = len(ids), 0
        if ids[:1] == [13]:
            raise ValueError("this prompt is not liked")
        finish = None
        while finish is None:
            await asyncio.sleep(STEP_S)
            count = 1 if len(ids) == prompt or self._width == 1 else 3
            rounds += len(ids) > prompt
            if count > 1:
                self._sample(ids, rid)
            for _ in range(count):
                ids.append(token_after(ids))
                made = len(ids) - prompt
                if made >= sampling["max_new_tokens"]:
                    finish = {"type": "length", "length": made}
                elif ids[-1] in sampling["stop_token_ids"] and not sampling["ignore_eos"]:
                    finish = {"type": "stop", "matched": ids[-1]}
                if finish:
                    break
            if rid in self._aborted:
                finish = {"type": "abort", "message": "Abort"}
            meta = {"finish_reason": finish, "cached_tokens": 0}
            if finish and self._width > 1:
                meta |= {"spec_verify_ct": rounds, "spec_correct_drafts_histogram": [0, 0, rounds]}
            yield {"output_ids": ids[prompt:], "meta_info": meta}
