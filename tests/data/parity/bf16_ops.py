#!/usr/bin/env python
"""Records the public implementation in BF16, op by op (transformers 5.24, eager, torch 2.11, CPU).

Run:  OMP_NUM_THREADS=1 python bf16_ops.py      (pip: torch==2.11.0 transformers==5.24.0 safetensors)

Reads config.json, spec.json, model.safetensors and inputs.safetensors of each configuration here, casts
the model to BF16 and writes beside them
  bf16_grads.safetensors  loss (FP32), logits and "grad.<parameter>" (BF16) of the model as it is
  bf16_ops.safetensors    (the configurations in OPS) what goes in and out of each op of one sliding and
                          one full layer, of the embedding, the final norm, the head, the softcap and
                          the cross entropy

In bf16_ops, "<op>.in" and "<op>.out" are values on the edge into and out of an op, "<op>.in.grad" and
"<op>.out.grad" the gradients that flow back over that very edge (not the sum over a tensor's uses);
"<op>.weight.grad" is the finished gradient of its weight. q, k, v are [B, S, heads * D], scores and
probabilities [B, heads, S, S]; k_rep and v_rep (repeat_kv's output) are [B, query heads, S, D].
The edges are recorded by identity functions. The script asserts that the gradients of the recorded
run are, bit for bit, those of the untouched model, so that what is recorded is the reference.
"""
import json, os
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
import transformers
transformers.logging.set_verbosity_error()
from transformers.models.gemma4 import modeling_gemma4 as mg
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

HERE = os.path.dirname(os.path.abspath(__file__))
OPS = {"cfg2_mixed_keqv_softcap": (1, 5), "cfg4_seq_gt_window": (1, 2)}  # sliding, full layer


def make_model(d):
    hf, spec = json.load(open(f"{d}/config.json")), json.load(open(f"{d}/spec.json"))
    drop = ("architectures", "transformers_version", "dtype", "model_type")
    cfg = Gemma4TextConfig(**{k: v for k, v in hf.items() if k not in drop})
    if cfg.layer_types != spec["layer_types"]:  # the constructor makes the last layer full
        cfg.layer_types = list(spec["layer_types"])
        cfg.per_layer_config = None
    cfg._attn_implementation = "eager"
    m = mg.Gemma4ForCausalLM(cfg).float().eval()
    w = load_file(f"{d}/model.safetensors")
    w["lm_head.weight"] = w["model.embed_tokens.weight"]
    m.load_state_dict(w)
    # from_pretrained(dtype=torch.bfloat16) leaves what is no part of the checkpoint, the frequencies of
    # RoPE, in FP32; .bfloat16() alone would round them too.
    inv_freq = {n: b for n, b in m.named_buffers() if n.endswith("inv_freq")}
    m = m.bfloat16()
    for n, b in inv_freq.items():
        m.get_submodule(n.rpartition(".")[0]).register_buffer(n.rpartition(".")[2], b, persistent=False)
    assert m.lm_head.weight is m.model.embed_tokens.weight
    return m


def run(m, ids, labels):
    out = m(input_ids=ids, use_cache=False).logits
    out.retain_grad()
    z = out.float()
    loss = F.cross_entropy(z.reshape(-1, z.shape[-1]), labels.reshape(-1))
    loss.backward()
    per_token = F.cross_entropy(z.detach().reshape(-1, z.shape[-1]), labels.reshape(-1), reduction="none")
    return out, loss.detach(), per_token


class Recorder:
    def __init__(self):
        self.tensors = {}

    def tap(self, x, name, layout=lambda t: t):
        recorder = self

        class Tap(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                recorder.put(name, layout(x))
                return x.view_as(x)

            @staticmethod
            def backward(ctx, g):
                recorder.put(name + ".grad", layout(g))
                return g

        return Tap.apply(x)

    def put(self, name, t):
        assert name not in self.tensors, name
        self.tensors[name] = t.detach().clone().contiguous()

    def hook(self, module, name):
        module.register_forward_pre_hook(lambda mod, a: (self.tap(a[0], name + ".in"),) + tuple(a[1:]))
        module.register_forward_hook(lambda mod, a, o: self.tap(o, name + ".out"))


def record_attention(rec, layers):
    """Replaces the two functions of the attention that are not modules; returns what undoes it."""
    rope, eager = mg.apply_rotary_pos_emb, mg.eager_attention_forward
    current = {"layer": None, "which": 0}

    def taped_rope(x, cos, sin, unsqueeze_dim=1):
        l = current["layer"]
        if l is None:
            return rope(x, cos, sin, unsqueeze_dim)
        name = f"layer{l}." + ("q_rope", "k_rope")[current["which"]]
        if current["which"] == 0:
            half = cos.shape[-1] // 2
            rec.put(f"layer{l}.cos", cos[0, :, :half])
            rec.put(f"layer{l}.sin", sin[0, :, :half])
        current["which"] += 1
        return rec.tap(rope(rec.tap(x, name + ".in"), cos, sin, unsqueeze_dim), name + ".out")

    def taped_eager(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, **kw):
        l = module.layer_idx
        if l not in layers:
            return eager(module, query, key, value, attention_mask, dropout, scaling, softcap, **kw)
        assert softcap is None and dropout == 0.0
        P = f"layer{l}."
        k = rec.tap(mg.repeat_kv(key, module.num_key_value_groups), P + "k_rep")
        v = rec.tap(mg.repeat_kv(value, module.num_key_value_groups), P + "v_rep")
        s = rec.tap(torch.matmul(query, k.transpose(2, 3)) * scaling, P + "scores")
        if attention_mask is not None:
            s = s + attention_mask
        p = rec.tap(F.softmax(s, dim=-1, dtype=torch.float32).to(query.dtype), P + "probs")
        return torch.matmul(p, v).transpose(1, 2).contiguous(), p

    mg.apply_rotary_pos_emb, mg.eager_attention_forward = taped_rope, taped_eager

    def undo():
        mg.apply_rotary_pos_emb, mg.eager_attention_forward = rope, eager
    return current, undo


def record(m, ids, labels, layers):
    rec = Recorder()
    m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight.detach().clone())  # so each use has its own gradient
    current, undo = record_attention(rec, layers)
    m.model.embed_tokens.register_forward_hook(lambda mod, a, o: rec.tap(o, "embed.out"))
    rec.hook(m.model.norm, "norm")
    rec.hook(m.lm_head, "head")
    for l in layers:
        layer, P = m.model.layers[l], f"layer{l}."

        def enter(mod, a, l=l):
            current.update(layer=l, which=0)
            return (rec.tap(a[0], f"layer{l}.in"),) + tuple(a[1:])

        def leave(mod, a, o, l=l):
            current.update(layer=None)
            return rec.tap(o, f"layer{l}.out")

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
        for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            rec.hook(getattr(layer, name), P + name)
        # A keyword argument reaches no pre-hook, but the modules inside are called by position.
        a = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "v_norm"):
            if getattr(a, name) is not None:
                rec.hook(getattr(a, name), P + name)
        for name in ("gate_proj", "up_proj", "down_proj"):
            rec.hook(getattr(layer.mlp, name), P + name)
        layer.mlp.act_fn.register_forward_hook(lambda mod, a, o, P=P: rec.tap(o, P + "gelu.out"))
    try:
        out, loss, per_token = run(m, ids, labels)
    finally:
        undo()
    rec.put("logits", out)
    rec.put("logits.grad", out.grad)
    rec.put("losses", per_token)
    for n, p in m.named_parameters():
        if n.startswith("model.layers.") and int(n.split(".")[2]) in layers:
            rec.put(f"layer{n.split('.')[2]}.{n.split('.')[-2]}.weight.grad", p.grad)
    rec.put("norm.weight.grad", m.model.norm.weight.grad)
    rec.put("embed.weight.grad", m.model.embed_tokens.weight.grad)
    rec.put("head.weight.grad", m.lm_head.weight.grad)
    return rec.tensors


def main():
    for name in sorted(os.listdir(HERE)):
        d = os.path.join(HERE, name)
        if not os.path.exists(f"{d}/model.safetensors"):
            continue
        batch = load_file(f"{d}/inputs.safetensors")
        ids, labels = batch["input_ids"].long(), batch["labels"].long()
        m = make_model(d)
        out, loss, _ = run(m, ids, labels)
        grads = {n: p.grad.clone() for n, p in m.named_parameters() if n != "lm_head.weight"}
        save_file({"loss": loss.reshape(1), "logits": out.detach(), **{"grad." + n: g for n, g in grads.items()}}, f"{d}/bf16_grads.safetensors")
        if name not in OPS:
            continue
        m = make_model(d)
        t = record(m, ids, labels, OPS[name])
        for n, g in grads.items():
            if n == "model.embed_tokens.weight":
                t["tied.weight.grad"] = g
                assert torch.equal(g, t["head.weight.grad"] + t["embed.weight.grad"])
            else:
                assert torch.equal(g, m.get_parameter(n).grad), n
        save_file(t, f"{d}/bf16_ops.safetensors")
        print(name, len(t), os.path.getsize(f"{d}/bf16_ops.safetensors"))


if __name__ == "__main__":
    main()
