"""The commands that run the engine and answer on stdout: generate, verify and config show.

Light on purpose, as `runtime.command_options`: the engine, and with it torch, loads when a command runs.
"""

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.command_options import (
    CONFIG_OPTIONS,
    ENGINE_OPTIONS,
    MODES,
    SAMPLING_OPTIONS,
    BudgetList,
    Json,
    OutputTokens,
    ProgressLine,
    PromptFile,
    PromptsPerKind,
    TemperatureList,
    budgets_of,
    config_options,
    emit_json,
    per_kind_of,
    tell,
    temperatures_of,
    with_room,
    words,
)

if TYPE_CHECKING:
    from runtime.config import ResolvedConfig, RuntimeConfig
    from runtime.interface import GenerateRequest, RequestAdmitted, RequestFinished, TokenPiece
    from runtime.local import LocalRuntime

EXIT_CODES = {"stop": 0, "length": 0, "error": 1, "cancelled": 130}

config_app = typer.Typer(help="Show settings and where each comes from.")


@config_options(*ENGINE_OPTIONS, *SAMPLING_OPTIONS)
def generate(
    resolved: "ResolvedConfig",
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text; - reads it from stdin.")],
    seed: Annotated[
        str | None, typer.Option(metavar="S", help="Seed of the sampling; default: random.")
    ] = None,
    min_p: Annotated[float, typer.Option(metavar="P", help="Drop tokens below P x the likeliest one.")] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text (up to 4).")
    ] = None,
    presence_penalty: Annotated[float, typer.Option(metavar="X", help="-2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(metavar="X", help="-2 to 2.")] = 0.0,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --json: log-probabilities of each token and the N likeliest."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    json: Json = False,
) -> int:
    """Generate one answer; text streams to stdout as it comes."""
    if logprobs is not None and not json:
        raise typer.BadParameter("needs --json, which shows them", param_hint="--logprobs")
    sampling = {
        "seed": seed,
        "min_p": min_p,
        "stop": tuple(stop or ()),
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logprobs": logprobs,
    }
    request = _request(_prompt_text(prompt, raw), raw, sampling)
    outcome = asyncio.run(_generate(resolved.config, request, _keep if json else _write_text))
    if json:
        emit_json(outcome.to_json())
    else:
        outcome.tell_figures()
    if outcome.finished.error:
        tell(outcome.finished.error)
    return EXIT_CODES[outcome.finished.reason]


@config_options(*ENGINE_OPTIONS, "top_p", "top_k")
def verify(
    resolved: "ResolvedConfig",
    prompts: PromptFile = None,
    prompts_per_kind: PromptsPerKind = None,
    mode: Annotated[
        str, typer.Option(metavar="LIST", help="Modes compared with plain decoding.")
    ] = "chain,tree",
    tree_budget: BudgetList = None,
    temperature: TemperatureList = "0,0.7",
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Seed of the sampling.")] = 7,
    max_tokens: OutputTokens = 64,
    json: Json = False,
) -> int:
    """Check that speculation changes no token.

    Every token of each mode must be the plain choice or a near-tie with it; exit 1 only for a real divergence.
    """
    budgets = budgets_of(resolved.config, tree_budget)
    temperatures = temperatures_of(resolved.config, temperature)
    modes = words("--mode", mode, MODES)
    per_kind = per_kind_of(prompts, prompts_per_kind)
    from runtime.verify import VerifyPlan, run_verify

    plan = VerifyPlan(
        config=with_room(resolved.config, budgets),
        modes=modes,
        budgets=budgets,
        temperatures=temperatures,
        seed=seed,
        prompts=prompts,
        prompts_per_kind=per_kind,
        max_tokens=max_tokens,
    )
    with ProgressLine() as progress:
        report = run_verify(plan, progress=progress)
    if json:
        emit_json(report.to_json())
    else:
        print(report.table(), flush=True)
    return report.exit_code


@config_app.command("show")
@config_options(*CONFIG_OPTIONS)
def config_show(
    resolved: "ResolvedConfig",
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    json: Json = False,
) -> None:
    """Print the settings in force, as a configuration file."""
    from runtime.config import to_toml

    values = resolved.config.model_dump()
    if json:
        emit_json({"config": values} | ({"origins": resolved.origins} if origin else {}))
        return
    given = dict(line.split(" = ", 1) for line in to_toml(resolved.config).splitlines())
    lines = {name: f"{name} = " + given.get(name, '"auto"') for name in sorted(values)}
    width = max(map(len, lines.values()))
    for name, line in lines.items():
        print(f"{line:<{width}}  # {resolved.origins[name]}" if origin else line)


def _prompt_text(prompt: str, raw: bool) -> str:
    if prompt == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise typer.BadParameter(
                f"stdin is not UTF-8 (byte {error.start})", param_hint="PROMPT"
            ) from None
        return text if raw else text.rstrip("\r\n")
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        raise typer.BadParameter("is not valid UTF-8", param_hint="PROMPT")
    return prompt


def _request(prompt: str, raw: bool, sampling: dict[str, Any]) -> "GenerateRequest":
    from pydantic import ValidationError

    from runtime.interface import GenerateRequest, RequestRejected, SamplingParams
    from runtime.rejection import rejection

    try:
        return GenerateRequest(prompt=prompt, raw=raw, sampling=SamplingParams(**sampling), client="generate")
    except ValidationError as error:
        refused = rejection(error, SamplingParams)
        raise RequestRejected(refused.line(), refused.field) from None


def _write_text(text: str) -> None:
    """Write a piece of the answer; on a terminal, characters that would steer it are replaced."""
    if sys.stdout.isatty():
        text = "".join(
            char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text
        )
    print(text, end="", flush=True)


def _keep(_text: str) -> None:
    """The whole answer is written at its end."""


@dataclass(frozen=True)
class _Outcome:
    """One request from its first to its last event."""

    admitted: "RequestAdmitted"
    pieces: "tuple[TokenPiece, ...]"
    finished: "RequestFinished"

    def to_json(self) -> dict[str, Any]:
        logprobs = [piece.logprob.model_dump() for piece in self.pieces if piece.logprob]
        return (
            {"text": self.finished.text, "token_ids": self.finished.token_ids, "seed": self.admitted.seed}
            | self.finished.stats.model_dump(exclude={"kind", "state", "client", "workload"})
            | {"finish_reason": self.finished.reason, "error": self.finished.error}
            | ({"logprobs": logprobs} if logprobs else {})
        )

    def tell_figures(self) -> None:
        """Say on stderr why speculation stayed away, if it did, and to a person how fast the answer came."""
        stats = self.finished.stats
        if stats.plain_reason:
            tell(f"plain decoding because {stats.plain_reason}")
        if sys.stderr.isatty():
            accept = f"{stats.accept_length:.2f}" if stats.accept_length is not None else "n/a"
            speed = f"{stats.tok_s:.1f}" if stats.tok_s is not None else "n/a"
            tell(
                f"{stats.output_tokens} tokens, {speed} tok/s, {accept} tokens per round ({self.finished.reason})"
            )


async def _generate(
    config: "RuntimeConfig", request: "GenerateRequest", write: Callable[[str], None]
) -> _Outcome:
    from runtime.connect import open_runtime

    runtime = await open_runtime(config)
    try:
        await wait_ready(runtime)
        return await _answer(runtime, request, write)
    finally:
        await runtime.aclose()


async def wait_ready(runtime: "LocalRuntime") -> None:
    """Wait until the engine can take requests, with the share loaded on a terminal."""
    ready = asyncio.ensure_future(runtime.wait_ready())
    with ProgressLine() as progress:
        try:
            while not (await asyncio.wait({ready}, timeout=0.1))[0]:
                status = await runtime.status()
                share = f" {status.load_progress:.0%}" if status.load_progress is not None else ""
                progress(f"{status.state}{share}: {status.reason}")
        finally:
            ready.cancel()
    await ready


async def _answer(
    runtime: "LocalRuntime", request: "GenerateRequest", write: Callable[[str], None]
) -> _Outcome:
    """Run one request. The first Ctrl-C cancels it, so that text and figures so far still come; a second one ends."""
    from runtime.interface import RequestAdmitted, RequestFinished, RuntimeUnavailable, TokensEmitted

    loop = asyncio.get_running_loop()
    cancelling: list[asyncio.Task[bool]] = []
    pieces: list[TokenPiece] = []

    def cancel(request_id: str) -> None:
        loop.remove_signal_handler(signal.SIGINT)
        cancelling.append(loop.create_task(runtime.cancel(request_id)))

    try:
        async with aclosing(runtime.generate(request)) as events:
            async for event in events:
                if isinstance(event, RequestAdmitted):
                    admitted = event
                    loop.add_signal_handler(signal.SIGINT, cancel, event.request_id)
                elif isinstance(event, TokensEmitted):
                    pieces += event.pieces
                    write("".join(piece.text for piece in event.pieces))
                elif isinstance(event, RequestFinished):
                    write(event.tail + "\n")
                    return _Outcome(admitted, tuple(pieces), event)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    raise RuntimeUnavailable("the runtime ended while it answered")
