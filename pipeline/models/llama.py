"""Llama-type text configs and tensor names of the transformers library, for our decoder."""

from __future__ import annotations

from pipeline.models.attention import RopeScaling
from pipeline.models.config import Config
from pipeline.models.language import DecoderSpec
from pipeline.models.weights import Source

Sources = dict[str, tuple[Source, ...]]


def decoder_spec(config: Config, *, is_head_tied: bool) -> DecoderSpec:
    """Read a `text_config` of model_type `llama`; CheckpointError for what we do not run.

    Missing keys have the defaults of transformers' LlamaConfig, which saves only what differs.
    """
    kind = config.text("model_type", "llama")
    if kind != "llama":
        raise config.wrong("model_type", kind, "llama")
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key, False):
            raise config.wrong(key, True, "false")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise config.wrong("hidden_act", activation, "silu")
    width = config.integer("hidden_size", 4096)
    num_heads = config.integer("num_attention_heads", 32)
    max_positions = config.integer("max_position_embeddings", 2048)
    rope = config.section("rope_parameters")
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    return DecoderSpec(
        num_layers=config.integer("num_hidden_layers", 32),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", width // num_heads),
        hidden_size=width,
        intermediate_size=config.integer("intermediate_size", 11_008),
        vocab_size=config.integer("vocab_size", 32_000),
        rope_theta=theta,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        is_head_tied=is_head_tied,
        rope_scaling=_rope_scaling(config, max_positions),
    )


def _rope_scaling(config: Config, max_positions: int) -> RopeScaling | None:
    # The newer key holds the same values as the older one, and theta besides.
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope = config.section(key)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise rope.wrong("rope_type", kind, "default, linear or llama3")
    return RopeScaling(
        kind,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        original_max_positions=rope.integer("original_max_position_embeddings", max_positions),
    )


def decoder_sources(spec: DecoderSpec, prefix: str) -> Sources:
    """Say which stored tensors become the decoder's parameters.

    `prefix` is where the text model's names begin; the head's is always `lm_head`.
    """
    embedding = f"{prefix}.embed_tokens.weight"
    names = (embedding, "lm_head.weight") if spec.is_head_tied else (embedding,)
    sources: Sources = {
        "decoder.embedding.weight": (Source(names),),
        "decoder.norm.weight": (Source((f"{prefix}.norm.weight",)),),
    }
    if not spec.is_head_tied:
        sources["decoder.head.weight"] = (Source(("lm_head.weight",)),)
    for layer in range(spec.num_layers):
        sources |= _block_sources(spec, f"{prefix}.layers.{layer}", layer)
    return sources


def _block_sources(spec: DecoderSpec, theirs: str, layer: int) -> Sources:
    ours = f"decoder.blocks.{layer}"
    kv_rows = spec.num_kv_heads * spec.head_dim

    def stacked(*parts: tuple[str, int]) -> tuple[Source, ...]:
        return tuple(Source((f"{theirs}.{name}.weight",), rows) for name, rows in parts)

    return {
        f"{ours}.attention_norm.weight": stacked(("input_layernorm", 0)),
        f"{ours}.qkv.weight": stacked(
            ("self_attn.q_proj", spec.num_heads * spec.head_dim),
            ("self_attn.k_proj", kv_rows),
            ("self_attn.v_proj", kv_rows),
        ),
        f"{ours}.out.weight": stacked(("self_attn.o_proj", 0)),
        f"{ours}.mlp_norm.weight": stacked(("post_attention_layernorm", 0)),
        f"{ours}.gate_up.weight": stacked(
            ("mlp.gate_proj", spec.intermediate_size), ("mlp.up_proj", spec.intermediate_size)
        ),
        f"{ours}.down.weight": stacked(("mlp.down_proj", 0)),
    }
