"""Figures of an SGLang server that runs already, read from `/server_info` and `/metrics`; nothing is changed."""

from __future__ import annotations

from typing import Any

import httpx

from runtime.interface import Frozen, RuntimeUnavailable

TIMEOUT_S = 10.0


class ServerFigures(Frozen):
    """What an SGLang server tells of itself; None where it does not."""

    url: str
    version: str | None = None
    model: str | None = None
    drafter: str | None = None
    algorithm: str | None = None
    """Speculative algorithm; None: plain decoding."""
    num_draft_tokens: int | None = None
    """Nodes of a verify pass, root included."""
    attention_backend: str | None = None
    degrees: str = "single"
    running: int | None = None
    waiting: int | None = None
    tok_s: float | None = None
    """Output tokens per second over all requests, as of its last log interval."""
    kv_usage: float | None = None
    """Share of the KV slots in use, 0 to 1."""
    accept_length: float | None = None
    """Tokens a round, bonus token included; mean since its figures were last reset."""
    kv_slots: int | None = None
    notes: tuple[str, ...] = ()


async def read_figures(url: str, key: str | None = None, transport: Any = None) -> ServerFigures:
    """The figures of the server at `url`; raises RuntimeUnavailable where no SGLang server answers there."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    notes: list[str] = []
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=TIMEOUT_S, transport=transport
    ) as client:
        info = await _info(client, base)
        metrics = await _metrics(client, notes)
    states = info.get("internal_states") or [{}]
    algorithm = _text(info.get("speculative_algorithm"))
    accept = _number(states[0].get("avg_spec_accept_length"))
    if algorithm is None:
        accept = None
    elif accept is None:
        accept = _positive(metrics.get("sglang:spec_accept_length"))
    degrees = [
        f"{name.upper()}{info[f'{name}_size']}"
        for name in ("tp", "ep", "pp", "dp")
        if int(info.get(f"{name}_size") or 1) > 1
    ]
    return ServerFigures(
        url=base,
        version=_text(info.get("version")),
        model=_text(info.get("served_model_name")) or _text(info.get("model_path")),
        drafter=_text(info.get("speculative_draft_model_path")),
        algorithm=algorithm,
        num_draft_tokens=_whole(info.get("speculative_num_draft_tokens")) if algorithm else None,
        attention_backend=_text(info.get("attention_backend")),
        degrees="+".join(degrees) or "single",
        running=_whole(metrics.get("sglang:num_running_reqs")),
        waiting=_whole(metrics.get("sglang:num_queue_reqs")),
        tok_s=_first(metrics.get("sglang:gen_throughput"), states[0].get("last_gen_throughput")),
        kv_usage=_number(metrics.get("sglang:token_usage")),
        accept_length=accept,
        kv_slots=_whole(_first(states[0].get("max_total_num_tokens"), info.get("max_total_num_tokens"))),
        notes=tuple(notes),
    )


async def _info(client: httpx.AsyncClient, base: str) -> dict[str, Any]:
    try:
        answer = await client.get("/server_info")
        if answer.status_code == 404:
            answer = await client.get("/get_server_info")
    except httpx.HTTPError as failure:
        raise RuntimeUnavailable(f"{base} does not answer: {failure or type(failure).__name__}") from None
    if answer.status_code in (401, 403):
        raise RuntimeUnavailable(
            f"{base} wants its API key (status {answer.status_code}); give it in SGLANG_API_KEY"
        )
    try:
        content = answer.json()
    except ValueError:
        content = None
    if answer.status_code != 200 or not isinstance(content, dict) or "internal_states" not in content:
        raise RuntimeUnavailable(
            f"{base} is no SGLang server: /server_info gives status {answer.status_code}"
        )
    return content


async def _metrics(client: httpx.AsyncClient, notes: list[str]) -> dict[str, float]:
    """Gauges by name, summed over ranks; empty, with a note, where the server was started without them."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        answer = await client.get("/metrics")
        if answer.status_code != 200:
            raise ValueError(answer.status_code)
        families = list(text_string_to_metric_families(answer.text))
    except (httpx.HTTPError, ValueError):
        notes.append("the server gives no metrics; start it with --enable-metrics")
        return {}
    found: dict[str, list[float]] = {}
    for family in families:
        if family.type == "gauge":
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.value)
    shares = {"sglang:token_usage", "sglang:spec_accept_length"}
    return {
        name: sum(values) / (len(values) if name in shares else 1) for name, values in found.items() if values
    }


def figure_lines(figures: ServerFigures) -> list[str]:
    """For a terminal, one line a topic."""

    def shown(value: float | int | str | None, pattern: str = "{}") -> str:
        return "n/a" if value is None else pattern.format(value)

    speculation = "plain decoding"
    if figures.algorithm is not None:
        width = shown(figures.num_draft_tokens)
        accept = shown(figures.accept_length, "{:.2f}")
        speculation = f"{figures.algorithm}, {width} rows a verify pass, accept length {accept}"
    usage = None if figures.kv_usage is None else 100 * figures.kv_usage
    lines = [
        f"SGLang {shown(figures.version)} at {figures.url} (read only)",
        f"model      {shown(figures.model)}, {figures.degrees}, attention {shown(figures.attention_backend)}",
        f"drafter    {shown(figures.drafter)}",
        f"decoding   {speculation}",
        f"requests   {shown(figures.running)} running, {shown(figures.waiting)} waiting",
        f"speed      {shown(figures.tok_s, '{:.1f} tok/s')}",
        f"KV slots   {shown(usage, '{:.0f} %')} of {shown(figures.kv_slots)}",
    ]
    return [*lines, *figures.notes]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _positive(value: Any) -> float | None:
    number = _number(value)
    return number if number else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _first(*values: Any) -> float | None:
    return next((number for number in map(_number, values) if number is not None), None)
