"""model.py equals transformers' Llama with the same weights and the code table as its embedding."""

import pytest
import torch
from conftest import ARMS, make_model

from model import GPT

transformers = pytest.importorskip("transformers", reason="tests/requirements.txt is not installed")


def as_llama(model: GPT):
    """The same network in transformers, weight by weight."""
    cfg = model.cfg
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, intermediate_size=4 * cfg.n_embd,
            num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, rms_norm_eps=cfg.norm_eps,
            max_position_embeddings=cfg.block_size, tie_word_embeddings=False, use_cache=False,
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
        )
    )  # fmt: skip
    weights = {
        "model.embed_tokens.weight": model.wte(torch.arange(cfg.vocab_size)),
        "model.norm.weight": model.norm_f.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for i, block in enumerate(model.blocks):
        at = f"model.layers.{i}."
        q, k, v = block.attn.qkv.weight.chunk(3)
        weights |= {
            at + "self_attn.q_proj.weight": q, at + "self_attn.k_proj.weight": k,
            at + "self_attn.v_proj.weight": v, at + "self_attn.o_proj.weight": block.attn.proj.weight,
            at + "mlp.gate_proj.weight": block.mlp.gate.weight,
            at + "mlp.up_proj.weight": block.mlp.up.weight,
            at + "mlp.down_proj.weight": block.mlp.down.weight,
            at + "input_layernorm.weight": block.norm_1.weight,
            at + "post_attention_layernorm.weight": block.norm_2.weight,
        }  # fmt: skip
    llama.load_state_dict({name: w.detach().clone() for name, w in weights.items()})
    return llama


@pytest.mark.parametrize("arm", ARMS)
def test_logits_and_gradients_equal_llamas(arm):
    model = make_model(input_mode=arm)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # gains other than 1, and weights large enough to matter
        for p in model.parameters():
            p.mul_(3 + torch.rand(p.shape, generator=generator)) if p.dim() > 1 else p.uniform_(
                0.5, 1.5, generator=generator
            )
    ids = torch.randint(512, (3, 32), generator=generator)
    targets = torch.randint(512, (3, 32), generator=generator)
    llama = as_llama(model)
    torch.testing.assert_close(llama(ids).logits, model(ids), atol=1e-5, rtol=1e-5)

    model(ids, targets).backward()
    logits = llama(ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for block, layer in zip(model.blocks, llama.model.layers):
        q, k, v = (m.weight.grad for m in (layer.self_attn.q_proj, layer.self_attn.k_proj,
                                            layer.self_attn.v_proj))  # fmt: skip
        pairs = [
            (block.attn.qkv, torch.cat([q, k, v])),
            (block.mlp.gate, layer.mlp.gate_proj.weight.grad),
            (block.mlp.up, layer.mlp.up_proj.weight.grad),
            (block.attn.proj, layer.self_attn.o_proj.weight.grad),
            (block.mlp.down, layer.mlp.down_proj.weight.grad),
            (block.norm_1, layer.input_layernorm.weight.grad),
            (block.norm_2, layer.post_attention_layernorm.weight.grad),
        ]  # fmt: skip
        for module, expected in pairs:
            torch.testing.assert_close(module.weight.grad, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.lm_head.weight.grad, llama.lm_head.weight.grad, atol=1e-4, rtol=1e-4)
    if arm == "learned":
        table = llama.model.embed_tokens.weight.grad
        torch.testing.assert_close(model.wte.weight.grad, table, atol=1e-4, rtol=1e-4)
