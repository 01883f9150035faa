#!/usr/bin/env python3
"""What transformers' Gemma 4 computes in one update, op by op, for `retrace diff`.

    retrace export RUN@k --out MODEL
    retrace trace RUN@k --tensors --out ours.safetensors
    PYTHON scripts/dump_hf_trace.py MODEL ours.safetensors --out theirs.safetensors [--dtype bfloat16]
    retrace diff ours.safetensors theirs.safetensors

The same weights (MODEL) and the same batch (that of the trace, micro-batch by micro-batch) go forward
and backward through Gemma4ForCausalLM with eager attention on the CPU; outputs and gradients are
written under retrace's names, heads and columns in its order. The optimizer is not part of it.
PYTHON has scripts/peer_requirements.txt: scripts/setup.sh --for-peers installs it in
~/.cache/retrace/peer-python/bin/python.

--fault plants a mistake that implementations have made, to see that the diff names it:
  embedding-scale=X       the embedding times X instead of sqrt(hidden size)
  window-off-by-one       sliding layers see one key more
  norm-one-plus-weight[=MODULE]   x / rms * (1 + w), in all norms or those whose name contains MODULE
  qk-norm-unreduced       q_norm's and k_norm's gradients are those of the first virtual shard's heads
"""
import argparse
import json
import sys
import tomllib


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder that 'retrace export' wrote")
    parser.add_argument("trace", help="what 'retrace trace --tensors' wrote: the batch, and the names")
    parser.add_argument("--out", required=True, help="the trace to write, safetensors")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fault", help="plant one of the faults above")
    return parser.parse_args()


class Dump:
    """Outputs of a micro-batch by op name; their gradients are there after the backward pass."""

    def __init__(self):
        self.outputs = {}

    def see(self, name, tensor):
        if tensor.requires_grad:
            tensor.retain_grad()
        self.outputs[name] = tensor

    def output_of(self, module, name):
        module.register_forward_hook(lambda _, __, output: self.see(name, output))

    def input_of(self, module, name):
        module.register_forward_pre_hook(lambda _, inputs: self.see(name, inputs[0]))


def rows(tensor):
    """[sequences, length, ...] as retrace has it: a row a token."""
    return tensor.detach().reshape(tensor.shape[0] * tensor.shape[1], -1)


def watch(model, dump):
    """Hooks under retrace's names. (Attention's operands: watch_attention.)"""
    text = model.model
    dump.output_of(text.embed_tokens, "embedding")
    for number, layer in enumerate(text.layers):
        attention, mlp, name = layer.self_attn, layer.mlp, f"layer{number}/"
        dump.output_of(layer.input_layernorm, name + "input_norm")
        for projection in ("q_proj", "k_proj", "v_proj"):
            if getattr(attention, projection) is not None:
                dump.output_of(getattr(attention, projection), name + projection)
        dump.output_of(attention.v_norm, name + "v_norm")
        dump.input_of(attention.o_proj, name + "attention")
        dump.output_of(attention.o_proj, name + "o_proj")
        dump.output_of(layer.post_attention_layernorm, name + "post_attention_norm")
        dump.input_of(layer.pre_feedforward_layernorm, name + "residual_attention")
        dump.output_of(layer.pre_feedforward_layernorm, name + "pre_mlp_norm")
        dump.output_of(mlp.gate_proj, name + "gate_proj")
        dump.output_of(mlp.up_proj, name + "up_proj")
        dump.input_of(mlp.down_proj, name + "geglu")
        dump.output_of(mlp.down_proj, name + "down_proj")
        dump.output_of(layer.post_feedforward_layernorm, name + "post_mlp_norm")
        dump.output_of(layer, name + "output")
    dump.output_of(text.norm, "final_norm")
    dump.output_of(model.lm_head, "head")


def watch_attention(dump):
    """q and k after RoPE are no module's outputs: they are seen where eager attention gets them."""
    from transformers.models.gemma4 import modeling_gemma4

    eager = modeling_gemma4.eager_attention_forward

    def traced(module, query, key, *more, **named):
        dump.see(f"layer{module.layer_idx}/q_rope", query)
        dump.see(f"layer{module.layer_idx}/k_rope", key)
        return eager(module, query, key, *more, **named)

    modeling_gemma4.eager_attention_forward = traced


def plant(model, fault):
    """The faults of the forward pass."""
    import torch

    kind, _, value = fault.partition("=")
    if kind == "embedding-scale":
        model.model.embed_tokens.embed_scale = torch.tensor(float(value))
    elif kind == "window-off-by-one":
        model.config.sliding_window += 1
    elif kind == "norm-one-plus-weight":
        found = 0
        for name, module in model.named_modules():
            if type(module).__name__ != "Gemma4RMSNorm" or not module.with_scale or value not in name:
                continue
            found += 1
            module.forward = lambda x, norm=module: (
                norm._norm(x.float()) * (1.0 + norm.weight.float())).type_as(x)
        if found == 0:
            sys.exit(f"dump_hf_trace: --fault {fault}: no norm's name contains '{value}'")
    elif kind != "qk-norm-unreduced":
        sys.exit(f"dump_hf_trace: --fault {fault}: unknown; see --help")


def watch_qk_norms(model, shards):
    """Inputs of q_norm and k_norm, and gradients of their outputs, of the first virtual shard's heads.
    -> function that gives the weights' gradients from them, by parameter name."""
    seen = {}

    def hook(name):
        def note(module, inputs, output):
            output.retain_grad()
            seen[name] = (module, inputs[0], output)
        return note

    for number, layer in enumerate(model.model.layers):
        for norm in ("q_norm", "k_norm"):
            name = f"model.layers.{number}.self_attn.{norm}.weight"
            getattr(layer.self_attn, norm).register_forward_hook(hook(name))

    def gradients():
        result = {}
        for name, (module, x, output) in seen.items():
            heads = max(1, x.shape[2] // shards)
            product = module._norm(x.detach().float()) * output.grad.float()
            result[name] = product[:, :, :heads].sum((0, 1, 2)).to(x.dtype)
        return result

    return gradients


def run_micro_batch(model, dump, ids, labels, divisor):
    """Forward and backward. -> tensors by retrace's name within the micro-batch."""
    import torch

    model.zero_grad(set_to_none=True)
    dump.outputs.clear()
    logits = model(input_ids=ids, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none")
    (losses.sum() / divisor).backward()
    tensors = {"ids": ids.float(), "labels": labels.float(), "logits": rows(logits),
               "loss": losses.detach().reshape(-1, 1)}
    for name, output in dump.outputs.items():
        by_heads = name.endswith("_rope")  # [sequences, heads, length, dim]
        value = output.transpose(1, 2) if by_heads else output
        if name != "head":
            tensors[name] = rows(value)
        if output.grad is not None:
            gradient = output.grad.transpose(1, 2) if by_heads else output.grad
            tensors[("logits" if name == "head" else name) + ".grad"] = rows(gradient)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[name + ".grad"] = parameter.grad.detach()
    return tensors


def whole_names(metadata):
    """Names of the trace's ops without shards, in order of execution."""
    names = {}
    for op in json.loads(metadata["retrace_ops"]):
        names.setdefault(op["op"].rsplit("/shard", 1)[0], len(names))
    return names


def write(tensors, header, order, path):
    from safetensors.torch import save_file

    names = sorted((name for name in tensors if name in order), key=order.get)
    types = {"torch.float32": "F32", "torch.bfloat16": "BF16"}
    kept, ops = {}, []
    for name in names:
        tensor = tensors[name]
        tensor = (tensor.reshape(1, -1) if tensor.dim() == 1 else tensor).clone().contiguous()
        kept[name] = tensor
        ops.append({"op": name, "shape": list(tensor.shape), "type": types[str(tensor.dtype)]})
    save_file(kept, path, metadata={"retrace_trace": json.dumps(header),
                                    "retrace_ops": json.dumps(ops)})
    return len(kept)


def main():
    args = arguments()
    import torch
    import transformers
    from safetensors import safe_open

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    with safe_open(args.trace, framework="pt") as file:
        metadata = file.metadata() or {}
        if "retrace_trace" not in metadata or "mb0/ids" not in file.keys():
            sys.exit(f"dump_hf_trace: {args.trace}: expected what 'retrace trace --tensors' writes, "
                     "with mb0/ids in it")
        count = sum(name.endswith("/ids") and name.startswith("mb") for name in file.keys())
        batches = [[file.get_tensor(f"mb{i}/{what}").long() for what in ("ids", "labels")]
                   for i in range(count)]
    header = json.loads(metadata["retrace_trace"])
    recipe = tomllib.loads(header["recipe"])
    dtype = getattr(torch, args.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, attn_implementation="eager", dtype=dtype)
    dump, order, tensors = Dump(), whole_names(metadata), {}
    watch(model, dump)
    watch_attention(dump)
    unreduced = None
    if args.fault:
        plant(model, args.fault)
        if args.fault == "qk-norm-unreduced":
            unreduced = watch_qk_norms(model, recipe["topology"]["virtual_shards"])
    for i, (ids, labels) in enumerate(batches):
        found = run_micro_batch(model, dump, ids, labels, ids.numel() * count)
        if unreduced:
            found.update({name + ".grad": value for name, value in unreduced().items()})
        tensors.update({f"mb{i}/{name}": value for name, value in found.items()})
    header["producer"] = f"transformers {transformers.__version__}"
    header["run"], header["recorded"] = args.model, "no"
    header.pop("ops", None)  # how many retrace wrote
    written = write(tensors, header, order, args.out)
    print(f"{args.out}: {written} ops of update {header['update']} by {header['producer']}, "
          f"{args.dtype}" + (f", with the fault {args.fault}" if args.fault else ""))


if __name__ == "__main__":
    main()
