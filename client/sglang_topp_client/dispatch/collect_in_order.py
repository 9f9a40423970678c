"""Collect one method call's results in the order of its prompts, with errors in place of failed samples."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from sglang_topp.errors import InvalidInputError, SglangToppError, describe
from sglang_topp_client.dispatch.dispatcher import OnFailure, Operation, Result
from sglang_topp_client.requests.plan_generate import SampleRequest

__all__ = ["collect_in_order"]


async def collect_in_order(
    operation: Operation[Result],
    requests: Sequence[SampleRequest],
    stream: Callable[[OnFailure | None], AsyncGenerator[Result, None]],
    *,
    return_exceptions: bool,
) -> list[Any]:
    """Return one entry per sample of `requests`, in order.

    Args:
        operation: `ROLLOUTS` or `SCORES`.
        requests: one `SampleRequest` for each prompt.
        stream: starts the method call, and yields its results in any order. The argument of `stream` is a
            callback for failed samples, or None. If calling `stream` fails, such as for a wrong argument, the
            error is raised even with `return_exceptions`.
        return_exceptions: if True, the entry of a failed sample is the error of the sample. If False, the
            first error is raised.

    Raises:
        InvalidInputError: `return_exceptions` is not a boolean.
    """
    if not isinstance(return_exceptions, bool):
        raise InvalidInputError(
            f"return_exceptions: got {describe(return_exceptions)}, expected True or False"
        )
    outcomes: dict[tuple[int, int], Result | SglangToppError] = {}
    results = stream(outcomes.__setitem__ if return_exceptions else None)
    places = [(request.prompt_index, sample) for request in requests for sample in request.samples]
    try:
        async for result in results:
            outcomes[operation.place(result)] = result
    except SglangToppError as error:
        # With `return_exceptions`, only an error that ends the whole method call arrives here: the time limit
        # passed, the method call was aborted, or no server answered. Every unfinished sample gets this error.
        if not return_exceptions:
            raise
        for place in places:
            outcomes.setdefault(place, error)
    return [outcomes[place] for place in places]
