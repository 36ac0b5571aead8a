"""One pipeline stage of the K3 decoder. (Being built; the call sequence below is the agreed one.)

    from services.worker.model.backends import choose_ops
    from services.worker.model.decoder import DecoderStage
    from services.worker.model.loader import load_stage_weights

    ops, choices = choose_ops(model, topology, device, dtype, cache_dtype,
                              attention_backend="auto", kda_backend="auto", moe_backend="auto")
    weights = load_stage_weights(path, model, topology, place, dtype, device)     # dict, consumed by DecoderStage
    stage = DecoderStage(model, topology, place, weights, caches, tp, experts, ops)

    out = stage.forward(batch, hop, on_step)     # Hop, or the final hidden [T, h] on the last stage
    logits = stage.logits(out[rows])             # [R, vocab] float32, equal on all tensor-parallel ranks (collective)

`path` is the checkpoint's folder, `device` a torch.device or its name, `dtype`/`cache_dtype` torch dtypes; `choices` is
the table to log (kernels.registry.format_table(choices)). Errors of all three are ConfigError.
"""
