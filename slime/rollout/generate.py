"""The default generation of one sample: one engine call, from a prompt or from where a sample stands.

Invariant: response ids and log-probs are the engine's own; text is only carried beside them (law 1).
Knows the engine client and a tokenizer; nothing of groups, rewards or schedules.
"""

from __future__ import annotations

import uuid
from typing import Any, Protocol

from slime.errors import ConfigError, DataError, EngineError
from slime.rollout.images import image_data
from slime.rollout.seeds import with_call_seed
from slime.utils.engine_client import EngineClient
from slime.utils.generation import Generation
from slime.utils.types import Sample


class Tokenizer(Protocol):
    """What rollouts need of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any:
        """A conversation as text."""
        ...


async def generate_sample(
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    engine: EngineClient,
    tokenizer: Tokenizer,
    max_context_len: int | None,
    timeout: float,
    args: Any = None,
) -> Sample:
    """Grow `sample` by one engine call and return it. Within a rollout each call has a seed of its own.

    The engine gets the images of `multimodal_inputs`; the prompt must hold a placeholder for each.

    Args:
        sampling_params: SGLang's; `max_new_tokens` is the budget of the whole response.
        max_context_len: most tokens of prompt and response.
        timeout: seconds for the call.

    Raises:
        DataError: the prompt is empty, cannot be rendered, or does not fit the context, or there is more than
            images beside it.
        EngineError, DeadlineError: as `EngineClient.generate`.
    """
    if not sample.tokens:
        sample.tokens = prompt_ids(sample, tokenizer)
    budget = new_token_budget(sample, sampling_params, max_context_len)
    if budget == 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    wants_routes = bool(getattr(args, "use_rollout_routing_replay", False))
    routes = sample.rollout_routed_experts
    held = len(routes) if routes is not None and routes.ndim == 3 else 0
    answer = await engine.generate(
        sample.tokens,
        with_call_seed(_within(sampling_params, budget)),
        rid=f"{sample.rollout_id}-{uuid.uuid4().hex}",
        routing_key=sample.session_id,
        timeout=timeout,
        image_data=image_data(sample),
        return_routed_experts=wants_routes,
        routed_experts_start=held if wants_routes else 0,
    )
    if wants_routes:
        _check_routes(answer, engine.url)
    sample.append_response_tokens(
        args,
        tokens=answer.output_ids,
        log_probs=answer.log_probs,
        meta_info=answer.meta_info,
        text=answer.text,
    )
    return sample


def prompt_ids(sample: Sample, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a sample's prompt; a message list is rendered with the chat template first.

    Raises:
        DataError: no token comes out, or the chat template refuses the messages.
    """
    text = sample.prompt if isinstance(sample.prompt, str) else _rendered(sample, tokenizer)
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    if not ids:
        raise DataError("the prompt is empty", place=f"sample {sample.index}")
    return ids


def new_token_budget(sample: Sample, sampling_params: dict[str, Any], max_context_len: int | None) -> int:
    """Tokens that this sample may still grow by.

    Raises:
        DataError: the prompt alone fills the context.
        ConfigError: no limit is known.
    """
    wanted: int | None = sampling_params.get("max_new_tokens")
    limits: list[int] = [] if wanted is None else [wanted - sample.response_length]
    if max_context_len is not None:
        if sample.prompt_length >= max_context_len:
            raise DataError(
                f"the prompt has {sample.prompt_length} tokens, the context holds {max_context_len}",
                place=f"sample {sample.index}",
                remedy="raise --rollout-max-context-len or set --rollout-max-prompt-len to drop such prompts",
            )
        limits.append(max_context_len - len(sample.tokens))
    if not limits:
        raise ConfigError("no limit on the response is set", place="--rollout-max-response-len")
    return max(0, min(limits))


def _check_routes(answer: Generation, url: str) -> None:
    if answer.output_ids and "routed_experts" not in answer.meta_info:
        raise EngineError(
            "the engine tells no routed experts, which --use-rollout-routing-replay replays",
            place=url,
            remedy="it must serve a mixture of experts and be started with --enable-return-routed-experts; a "
            "router that drops return_routed_experts must be passed by",
        )


def _within(sampling_params: dict[str, Any], budget: int) -> dict[str, Any]:
    params = sampling_params | {"max_new_tokens": budget}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = min(params["min_new_tokens"], budget)
    return params


def _rendered(sample: Sample, tokenizer: Tokenizer) -> str:
    import jinja2

    assert not isinstance(sample.prompt, str)
    try:
        text = tokenizer.apply_chat_template(
            sample.prompt,
            tools=sample.metadata.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **sample.apply_chat_template_kwargs,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the chat template does not render the prompt: {error}",
            place=f"sample {sample.index}",
            remedy="use a model with a chat template, or prompts that are texts",
        ) from error
    return str(text)
