"""`ddtree serve`: the headless runtime with its HTTP API.

Light on purpose, as `runtime.command_options`: the server, and with it torch, loads when the command runs.
"""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.command_options import ENGINE_OPTIONS, SAMPLING_OPTIONS, Given, config_options, tell, words

if TYPE_CHECKING:
    from runtime.config import ResolvedConfig

QUEUE_OPTIONS = ("max_queue", "queue_timeout")


@config_options(*ENGINE_OPTIONS, *SAMPLING_OPTIONS, *QUEUE_OPTIONS)
def serve(
    context: typer.Context,
    given: Given,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; others than loopback need DDTREE_API_KEY."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 = any free one.")] = 8642,
    drain_seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="Time accepted requests have to finish at the end.")
    ] = 30.0,
    request_timeout: Annotated[
        float,
        typer.Option(
            metavar="S", min=0.0, help="Longest time of one request, waiting included; 0 = no limit."
        ),
    ] = 3600.0,
    max_body_bytes: Annotated[int, typer.Option(metavar="N", min=1024, help="Largest request body.")] = 2
    * 1024
    * 1024,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web origin whose pages may call; may be repeated."),
    ] = None,
    no_fallback: Annotated[
        bool,
        typer.Option(
            "--no-fallback", help="Fail, rather than serve the last good configuration, if this one fails."
        ),
    ] = False,
    log_format: Annotated[str, typer.Option(metavar="text|json", help="Form of the log on stderr.")] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
) -> int:
    """Serve without a screen: OpenAI-compatible API, metrics, control; SIGTERM drains."""
    origins = tuple(cors_origin or ())
    for origin in origins:
        if not re.fullmatch(r"https?://[^/\s*]+", origin):
            raise typer.BadParameter(
                f"{origin!r} is not an origin such as https://example.org", param_hint="--cors-origin"
            )
    (style,) = words("--log-format", log_format, ("text", "json"))[:1]
    resolved, degraded = _resolve(given, not no_fallback)
    config = resolved.config
    from runtime.listener import ServerSettings
    from runtime.logs import log_to_stderr
    from runtime.serve import ServeOptions
    from runtime.serve import serve as run

    log_to_stderr(config.log_level, style, show_prompts=log_prompts)  # type: ignore[arg-type]
    settings = ServerSettings(
        host=host,
        port=port,
        cors_origins=origins,
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout or None,
    )
    keeper = context.obj() if context.obj is not None else None
    options = ServeOptions(settings, drain_seconds, not no_fallback, degraded, resolved.origins, keeper)
    return run(config, options, lambda: given.resolve().config)


def _resolve(given: Given, fall_back: bool) -> "tuple[ResolvedConfig, str | None]":
    """The configuration asked for; or, where a file or variable is wrong, the last good one with the reason.

    Raises ConfigRejected where the command line is wrong, or there is nothing to fall back to.
    """
    from runtime.config import ResolvedConfig, validate
    from runtime.interface import ConfigRejected
    from runtime.last_good import last_good_file, recall

    try:
        return given.resolve(), None
    except ConfigRejected as refused:
        named_file_is_there = given.file is None or given.file.exists()
        good = recall(last_good_file()) if fall_back and named_file_is_there else None
        try:
            validate({name: value for name, value in given.options.items() if value is not None})
        except ConfigRejected:
            raise refused from None
        if good is None:
            raise
        reason = f"the last good configuration is served, because the one asked for is wrong: {refused}"
    tell(reason)
    origins = dict.fromkeys(type(good).model_fields, "last good configuration")
    return ResolvedConfig(config=good, origins=origins), reason
