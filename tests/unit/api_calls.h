/* Made from tshard.h by `python3 tests/lint/calls.py --write`; `make lint` checks that
 * it is up to date. See test_api.c, which includes it. */

enum {
    STRUCT_tsh_coll,
    STRUCT_tsh_desc,
    STRUCT_tsh_init,
    STRUCT_tsh_backward_desc,
    STRUCT_tsh_sampler,
    STRUCT_tsh_lookup_desc,
    STRUCT_tsh_rms_norm_desc,
    STRUCT_tsh_rope_desc,
    STRUCT_tsh_attention_desc,
    STRUCT_tsh_cross_entropy_desc,
    STRUCT_tsh_chunks_desc,
    STRUCT_tsh_sample_desc,
    STRUCT_tsh_custom_op_desc,
    STRUCT_tsh_loss_desc,
    STRUCT_tsh_module_desc,
    STRUCT_tsh_layer_norm_desc,
    STRUCT_tsh_param_desc,
    STRUCT_tsh_plan_rule,
    STRUCT_tsh_linear_desc,
    STRUCT_tsh_classifier_desc,
    STRUCT_tsh_embedding_desc,
    STRUCT_tsh_attention_layer_desc,
    STRUCT_tsh_mlp_desc,
    STRUCT_tsh_policy,
    STRUCT_tsh_conv_options,
    STRUCT_tsh_pool_options,
    STRUCT_tsh_interpolate_options,
    STRUCT_tsh_conv_desc,
    STRUCT_tsh_batch_norm_options,
    STRUCT_tsh_batch_norm_desc,
    STRUCT_tsh_group_norm_desc,
    STRUCT_tsh_instance_norm_desc,
    STRUCT_tsh_recurrent_desc,
    STRUCT_tsh_schedule,
    STRUCT_tsh_plateau,
    STRUCT_tsh_optim_desc,
    STRUCT_tsh_lora_desc,
    STRUCT_tsh_outer_desc,
    STRUCT_tsh_pipeline_desc,
    STRUCT_tsh_file_desc,
    STRUCT_tsh_trace_desc,
    STRUCT_tsh_policy_layer,
    STRUCT_tsh_lora_part,
    STRUCT_tsh_rename,
    STRUCT_tsh_hasher,
    STRUCT_tsh_policy_heads,
    API_STRUCTS
};

static const api_field fields_of_tsh_coll[] = {
    {offsetof(tsh_coll, size), {WORD, 0, "size"}},
    {offsetof(tsh_coll, kind), {ENUM, 0, "kind"}},
    {offsetof(tsh_coll, dtype), {DTYPE, 0, "dtype"}},
    {offsetof(tsh_coll, redop), {ENUM, 0, "redop"}},
    {offsetof(tsh_coll, send), {BUFFER, 0, "send"}},
    {offsetof(tsh_coll, recv), {OUTPUT, 0, "recv"}},
    {offsetof(tsh_coll, count), {LONG, 0, "count"}},
    {offsetof(tsh_coll, send_counts), {LONGS, 0, "send_counts"}},
    {offsetof(tsh_coll, recv_counts), {LONGS, 0, "recv_counts"}},
    {offsetof(tsh_coll, blocks), {LONG, 0, "blocks"}},
    {offsetof(tsh_coll, root), {INT, 0, "root"}},
    {offsetof(tsh_coll, send_to), {INT, 0, "send_to"}},
    {offsetof(tsh_coll, recv_from), {INT, 0, "recv_from"}},
    {offsetof(tsh_coll, tag), {INT, 0, "tag"}},
    {offsetof(tsh_coll, seq), {LONG, 0, "seq"}},
    {offsetof(tsh_coll, timeout_ns), {LONG, 0, "timeout_ns"}},
};

static const api_field fields_of_tsh_desc[] = {
    {offsetof(tsh_desc, tp), {INT, 0, "tp"}},
    {offsetof(tsh_desc, pp), {INT, 0, "pp"}},
    {offsetof(tsh_desc, order), {TEXT, 0, "order"}},
    {offsetof(tsh_desc, seed), {LONG, 0, "seed"}},
    {offsetof(tsh_desc, threads), {INT, 0, "threads"}},
    {offsetof(tsh_desc, bucket_bytes), {SIZE, 0, "bucket_bytes"}},
    {offsetof(tsh_desc, no_overlap), {INT, 0, "no_overlap"}},
    {offsetof(tsh_desc, dtype), {DTYPE, 0, "dtype"}},
    {offsetof(tsh_desc, shares), {INTS, 0, "shares"}},
    {offsetof(tsh_desc, wire), {DTYPE, 0, "wire"}},
};

static const api_field fields_of_tsh_init[] = {
    {offsetof(tsh_init, kind), {ENUM, 0, "kind"}},
    {offsetof(tsh_init, a), {DOUBLE, 0, "a"}},
    {offsetof(tsh_init, b), {DOUBLE, 0, "b"}},
    {offsetof(tsh_init, gain), {DOUBLE, 0, "gain"}},
    {offsetof(tsh_init, fan_out), {INT, 0, "fan_out"}},
    {offsetof(tsh_init, low), {DOUBLE, 0, "low"}},
    {offsetof(tsh_init, high), {DOUBLE, 0, "high"}},
};

static const api_field fields_of_tsh_backward_desc[] = {
    {offsetof(tsh_backward_desc, defer), {INT, 0, "defer"}},
    {offsetof(tsh_backward_desc, summed), {INT, 0, "summed"}},
    {offsetof(tsh_backward_desc, weight), {DOUBLE, 0, "weight"}},
};

static const api_field fields_of_tsh_sampler[] = {
    {offsetof(tsh_sampler, count), {LONG, 0, "count"}},
    {offsetof(tsh_sampler, batch), {LONG, 0, "batch"}},
    {offsetof(tsh_sampler, shuffle), {ENUM, 0, "shuffle"}},
    {offsetof(tsh_sampler, drop_last), {INT, 0, "drop_last"}},
    {offsetof(tsh_sampler, seed), {LONG, 0, "seed"}},
    {offsetof(tsh_sampler, epoch), {LONG, 0, "epoch"}},
    {offsetof(tsh_sampler, at), {LONG, 0, "at"}},
    {offsetof(tsh_sampler, first), {LONG, 0, "first"}},
    {offsetof(tsh_sampler, mine), {LONG, 0, "mine"}},
};

static const api_field fields_of_tsh_lookup_desc[] = {
    {offsetof(tsh_lookup_desc, padding), {INT, 0, "padding"}},
    {offsetof(tsh_lookup_desc, padding_idx), {LONG, 0, "padding_idx"}},
    {offsetof(tsh_lookup_desc, max_norm), {DOUBLE, 0, "max_norm"}},
    {offsetof(tsh_lookup_desc, norm_type), {DOUBLE, 0, "norm_type"}},
    {offsetof(tsh_lookup_desc, scale_grad_by_freq), {INT, 0, "scale_grad_by_freq"}},
    {offsetof(tsh_lookup_desc, sparse), {INT, 0, "sparse"}},
};

static const api_field fields_of_tsh_rms_norm_desc[] = {
    {offsetof(tsh_rms_norm_desc, dim), {LONG, 0, "dim"}},
    {offsetof(tsh_rms_norm_desc, eps), {DOUBLE, 0, "eps"}},
    {offsetof(tsh_rms_norm_desc, plus_one), {INT, 0, "plus_one"}},
    {offsetof(tsh_rms_norm_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_rope_desc[] = {
    {offsetof(tsh_rope_desc, base), {DOUBLE, 0, "base"}},
    {offsetof(tsh_rope_desc, dims), {LONG, 0, "dims"}},
    {offsetof(tsh_rope_desc, interleaved), {INT, 0, "interleaved"}},
    {offsetof(tsh_rope_desc, start), {LONG, 0, "start"}},
    {offsetof(tsh_rope_desc, freqs), {DOUBLES, 0, "freqs"}},
    {offsetof(tsh_rope_desc, factor), {DOUBLE, 0, "factor"}},
    {offsetof(tsh_rope_desc, starts), {LONGS, 0, "starts"}},
};

static const api_field fields_of_tsh_attention_desc[] = {
    {offsetof(tsh_attention_desc, causal), {INT, 0, "causal"}},
    {offsetof(tsh_attention_desc, scale), {DOUBLE, 0, "scale"}},
    {offsetof(tsh_attention_desc, dropout), {DOUBLE, 0, "dropout"}},
    {offsetof(tsh_attention_desc, owner), {MODULE, 0, "owner"}},
    {offsetof(tsh_attention_desc, mask), {TENSOR, 0, "mask"}},
    {offsetof(tsh_attention_desc, cache_k), {TENSOR, 0, "cache_k"}},
    {offsetof(tsh_attention_desc, cache_v), {TENSOR, 0, "cache_v"}},
    {offsetof(tsh_attention_desc, past), {LONG, 0, "past"}},
    {offsetof(tsh_attention_desc, pasts), {LONGS, 0, "pasts"}},
    {offsetof(tsh_attention_desc, lengths), {LONGS, 0, "lengths"}},
    {offsetof(tsh_attention_desc, window), {LONG, 0, "window"}},
    {offsetof(tsh_attention_desc, soft_cap), {DOUBLE, 0, "soft_cap"}},
    {offsetof(tsh_attention_desc, sinks), {TENSOR, 0, "sinks"}},
    {offsetof(tsh_attention_desc, segments), {TENSOR, 0, "segments"}},
};

static const api_field fields_of_tsh_cross_entropy_desc[] = {
    {offsetof(tsh_cross_entropy_desc, reduction), {ENUM, 0, "reduction"}},
    {offsetof(tsh_cross_entropy_desc, ignore), {INT, 0, "ignore"}},
    {offsetof(tsh_cross_entropy_desc, ignore_index), {LONG, 0, "ignore_index"}},
    {offsetof(tsh_cross_entropy_desc, empty_zero), {INT, 0, "empty_zero"}},
    {offsetof(tsh_cross_entropy_desc, label_smoothing), {DOUBLE, 0, "label_smoothing"}},
    {offsetof(tsh_cross_entropy_desc, z_loss), {DOUBLE, 0, "z_loss"}},
    {offsetof(tsh_cross_entropy_desc, weight), {TENSOR, 0, "weight"}},
    {offsetof(tsh_cross_entropy_desc, dim), {INT, 0, "dim"}},
};

static const api_field fields_of_tsh_chunks_desc[] = {
    {offsetof(tsh_chunks_desc, fn), {FUNCTION, 6, "fn"}},
    {offsetof(tsh_chunks_desc, user), {USER, 0, "user"}},
    {offsetof(tsh_chunks_desc, rows), {LONG, 0, "rows"}},
};

static const api_field fields_of_tsh_sample_desc[] = {
    {offsetof(tsh_sample_desc, penalty), {DOUBLE, 0, "penalty"}},
    {offsetof(tsh_sample_desc, previous), {TENSOR, 0, "previous"}},
    {offsetof(tsh_sample_desc, temperature), {DOUBLE, 0, "temperature"}},
    {offsetof(tsh_sample_desc, top_k), {LONG, 0, "top_k"}},
    {offsetof(tsh_sample_desc, top_p), {DOUBLE, 0, "top_p"}},
    {offsetof(tsh_sample_desc, min_p), {DOUBLE, 0, "min_p"}},
    {offsetof(tsh_sample_desc, seed), {LONG, 0, "seed"}},
    {offsetof(tsh_sample_desc, position), {LONG, 0, "position"}},
};

static const api_field fields_of_tsh_custom_op_desc[] = {
    {offsetof(tsh_custom_op_desc, name), {TEXT, 0, "name"}},
    {offsetof(tsh_custom_op_desc, outputs), {INT, 0, "outputs"}},
    {offsetof(tsh_custom_op_desc, out[0].shape), {SHAPE, 0, "out[0].shape"}},
    {offsetof(tsh_custom_op_desc, out[0].layout), {LAYOUT, 0, "out[0].layout"}},
    {offsetof(tsh_custom_op_desc, out[0].dtype), {DTYPE, 0, "out[0].dtype"}},
    {offsetof(tsh_custom_op_desc, out[1].shape), {SHAPE, 0, "out[1].shape"}},
    {offsetof(tsh_custom_op_desc, out[1].layout), {LAYOUT, 0, "out[1].layout"}},
    {offsetof(tsh_custom_op_desc, out[1].dtype), {DTYPE, 0, "out[1].dtype"}},
    {offsetof(tsh_custom_op_desc, partial), {INT, 0, "partial"}},
    {offsetof(tsh_custom_op_desc, forward), {FUNCTION, 7, "forward"}},
    {offsetof(tsh_custom_op_desc, backward), {FUNCTION, 8, "backward"}},
    {offsetof(tsh_custom_op_desc, user), {USER, 0, "user"}},
};

static const api_field fields_of_tsh_loss_desc[] = {
    {offsetof(tsh_loss_desc, reduction), {ENUM, 0, "reduction"}},
    {offsetof(tsh_loss_desc, weight), {TENSOR, 0, "weight"}},
    {offsetof(tsh_loss_desc, pos_weight), {TENSOR, 0, "pos_weight"}},
    {offsetof(tsh_loss_desc, delta), {DOUBLE, 0, "delta"}},
    {offsetof(tsh_loss_desc, beta), {DOUBLE, 0, "beta"}},
    {offsetof(tsh_loss_desc, log_target), {INT, 0, "log_target"}},
    {offsetof(tsh_loss_desc, ignore), {INT, 0, "ignore"}},
    {offsetof(tsh_loss_desc, ignore_index), {LONG, 0, "ignore_index"}},
    {offsetof(tsh_loss_desc, dim), {INT, 0, "dim"}},
};

static const api_field fields_of_tsh_module_desc[] = {
    {offsetof(tsh_module_desc, forward), {FUNCTION, 9, "forward"}},
    {offsetof(tsh_module_desc, user), {USER, 0, "user"}},
};

static const api_field fields_of_tsh_layer_norm_desc[] = {
    {offsetof(tsh_layer_norm_desc, dim), {LONG, 0, "dim"}},
    {offsetof(tsh_layer_norm_desc, eps), {DOUBLE, 0, "eps"}},
    {offsetof(tsh_layer_norm_desc, dtype), {DTYPE, 0, "dtype"}},
    {offsetof(tsh_layer_norm_desc, bias), {ENUM, 0, "bias"}},
};

static const api_field fields_of_tsh_param_desc[] = {
    {offsetof(tsh_param_desc, init.kind), {ENUM, 0, "init.kind"}},
    {offsetof(tsh_param_desc, init.a), {DOUBLE, 0, "init.a"}},
    {offsetof(tsh_param_desc, init.b), {DOUBLE, 0, "init.b"}},
    {offsetof(tsh_param_desc, init.gain), {DOUBLE, 0, "init.gain"}},
    {offsetof(tsh_param_desc, init.fan_out), {INT, 0, "init.fan_out"}},
    {offsetof(tsh_param_desc, init.low), {DOUBLE, 0, "init.low"}},
    {offsetof(tsh_param_desc, init.high), {DOUBLE, 0, "init.high"}},
    {offsetof(tsh_param_desc, layout), {LAYOUT_AT, 0, "layout"}},
    {offsetof(tsh_param_desc, buffer), {INT, 0, "buffer"}},
    {offsetof(tsh_param_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_plan_rule[] = {
    {offsetof(tsh_plan_rule, path), {TEXT, 0, "path"}},
    {offsetof(tsh_plan_rule, style), {ENUM, 0, "style"}},
    {offsetof(tsh_plan_rule, segments), {INT, 0, "segments"}},
    {offsetof(tsh_plan_rule, unit), {LONG, 0, "unit"}},
    {offsetof(tsh_plan_rule, gather_output), {INT, 0, "gather_output"}},
    {offsetof(tsh_plan_rule, input), {LAYOUT_AT, 0, "input"}},
    {offsetof(tsh_plan_rule, output), {LAYOUT_AT, 0, "output"}},
    {offsetof(tsh_plan_rule, regather), {INT, 0, "regather"}},
    {offsetof(tsh_plan_rule, kind), {TEXT, 0, "kind"}},
    {offsetof(tsh_plan_rule, inputs), {LAYOUTS, 0, "inputs"}},
    {offsetof(tsh_plan_rule, input_count), {COUNT, 0, "input_count"}},
    {offsetof(tsh_plan_rule, cut), {SEGMENTS, 0, "cut"}},
};

static const api_field fields_of_tsh_linear_desc[] = {
    {offsetof(tsh_linear_desc, in), {LONG, 0, "in"}},
    {offsetof(tsh_linear_desc, out), {LONG, 0, "out"}},
    {offsetof(tsh_linear_desc, input), {LAYOUT_AT, 0, "input"}},
    {offsetof(tsh_linear_desc, output), {LAYOUT_AT, 0, "output"}},
    {offsetof(tsh_linear_desc, bias), {ENUM, 0, "bias"}},
    {offsetof(tsh_linear_desc, style), {ENUM, 0, "style"}},
    {offsetof(tsh_linear_desc, segments), {INT, 0, "segments"}},
    {offsetof(tsh_linear_desc, unit), {LONG, 0, "unit"}},
    {offsetof(tsh_linear_desc, gather_output), {INT, 0, "gather_output"}},
    {offsetof(tsh_linear_desc, skip_bias_add), {INT, 0, "skip_bias_add"}},
    {offsetof(tsh_linear_desc, reversed), {INT, 0, "reversed"}},
    {offsetof(tsh_linear_desc, regather), {INT, 0, "regather"}},
    {offsetof(tsh_linear_desc, weight_init.kind), {ENUM, 0, "weight_init.kind"}},
    {offsetof(tsh_linear_desc, weight_init.a), {DOUBLE, 0, "weight_init.a"}},
    {offsetof(tsh_linear_desc, weight_init.b), {DOUBLE, 0, "weight_init.b"}},
    {offsetof(tsh_linear_desc, weight_init.gain), {DOUBLE, 0, "weight_init.gain"}},
    {offsetof(tsh_linear_desc, weight_init.fan_out), {INT, 0, "weight_init.fan_out"}},
    {offsetof(tsh_linear_desc, weight_init.low), {DOUBLE, 0, "weight_init.low"}},
    {offsetof(tsh_linear_desc, weight_init.high), {DOUBLE, 0, "weight_init.high"}},
    {offsetof(tsh_linear_desc, bias_init.kind), {ENUM, 0, "bias_init.kind"}},
    {offsetof(tsh_linear_desc, bias_init.a), {DOUBLE, 0, "bias_init.a"}},
    {offsetof(tsh_linear_desc, bias_init.b), {DOUBLE, 0, "bias_init.b"}},
    {offsetof(tsh_linear_desc, bias_init.gain), {DOUBLE, 0, "bias_init.gain"}},
    {offsetof(tsh_linear_desc, bias_init.fan_out), {INT, 0, "bias_init.fan_out"}},
    {offsetof(tsh_linear_desc, bias_init.low), {DOUBLE, 0, "bias_init.low"}},
    {offsetof(tsh_linear_desc, bias_init.high), {DOUBLE, 0, "bias_init.high"}},
    {offsetof(tsh_linear_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_classifier_desc[] = {
    {offsetof(tsh_classifier_desc, in), {LONG, 0, "in"}},
    {offsetof(tsh_classifier_desc, classes), {LONG, 0, "classes"}},
    {offsetof(tsh_classifier_desc, weight), {TENSOR, 0, "weight"}},
    {offsetof(tsh_classifier_desc, input), {LAYOUT_AT, 0, "input"}},
    {offsetof(tsh_classifier_desc, bias), {ENUM, 0, "bias"}},
    {offsetof(tsh_classifier_desc, style), {ENUM, 0, "style"}},
    {offsetof(tsh_classifier_desc, gather_output), {INT, 0, "gather_output"}},
    {offsetof(tsh_classifier_desc, weight_init.kind), {ENUM, 0, "weight_init.kind"}},
    {offsetof(tsh_classifier_desc, weight_init.a), {DOUBLE, 0, "weight_init.a"}},
    {offsetof(tsh_classifier_desc, weight_init.b), {DOUBLE, 0, "weight_init.b"}},
    {offsetof(tsh_classifier_desc, weight_init.gain), {DOUBLE, 0, "weight_init.gain"}},
    {offsetof(tsh_classifier_desc, weight_init.fan_out), {INT, 0, "weight_init.fan_out"}},
    {offsetof(tsh_classifier_desc, weight_init.low), {DOUBLE, 0, "weight_init.low"}},
    {offsetof(tsh_classifier_desc, weight_init.high), {DOUBLE, 0, "weight_init.high"}},
    {offsetof(tsh_classifier_desc, bias_init.kind), {ENUM, 0, "bias_init.kind"}},
    {offsetof(tsh_classifier_desc, bias_init.a), {DOUBLE, 0, "bias_init.a"}},
    {offsetof(tsh_classifier_desc, bias_init.b), {DOUBLE, 0, "bias_init.b"}},
    {offsetof(tsh_classifier_desc, bias_init.gain), {DOUBLE, 0, "bias_init.gain"}},
    {offsetof(tsh_classifier_desc, bias_init.fan_out), {INT, 0, "bias_init.fan_out"}},
    {offsetof(tsh_classifier_desc, bias_init.low), {DOUBLE, 0, "bias_init.low"}},
    {offsetof(tsh_classifier_desc, bias_init.high), {DOUBLE, 0, "bias_init.high"}},
    {offsetof(tsh_classifier_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_embedding_desc[] = {
    {offsetof(tsh_embedding_desc, count), {LONG, 0, "count"}},
    {offsetof(tsh_embedding_desc, dim), {LONG, 0, "dim"}},
    {offsetof(tsh_embedding_desc, style), {ENUM, 0, "style"}},
    {offsetof(tsh_embedding_desc, output), {LAYOUT_AT, 0, "output"}},
    {offsetof(tsh_embedding_desc, init.kind), {ENUM, 0, "init.kind"}},
    {offsetof(tsh_embedding_desc, init.a), {DOUBLE, 0, "init.a"}},
    {offsetof(tsh_embedding_desc, init.b), {DOUBLE, 0, "init.b"}},
    {offsetof(tsh_embedding_desc, init.gain), {DOUBLE, 0, "init.gain"}},
    {offsetof(tsh_embedding_desc, init.fan_out), {INT, 0, "init.fan_out"}},
    {offsetof(tsh_embedding_desc, init.low), {DOUBLE, 0, "init.low"}},
    {offsetof(tsh_embedding_desc, init.high), {DOUBLE, 0, "init.high"}},
    {offsetof(tsh_embedding_desc, lookup.padding), {INT, 0, "lookup.padding"}},
    {offsetof(tsh_embedding_desc, lookup.padding_idx), {LONG, 0, "lookup.padding_idx"}},
    {offsetof(tsh_embedding_desc, lookup.max_norm), {DOUBLE, 0, "lookup.max_norm"}},
    {offsetof(tsh_embedding_desc, lookup.norm_type), {DOUBLE, 0, "lookup.norm_type"}},
    {offsetof(tsh_embedding_desc, lookup.scale_grad_by_freq), {INT, 0,
        "lookup.scale_grad_by_freq"}},
    {offsetof(tsh_embedding_desc, lookup.sparse), {INT, 0, "lookup.sparse"}},
    {offsetof(tsh_embedding_desc, weight), {TENSOR, 0, "weight"}},
    {offsetof(tsh_embedding_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_attention_layer_desc[] = {
    {offsetof(tsh_attention_layer_desc, dim), {LONG, 0, "dim"}},
    {offsetof(tsh_attention_layer_desc, heads), {LONG, 0, "heads"}},
    {offsetof(tsh_attention_layer_desc, kv_heads), {LONG, 0, "kv_heads"}},
    {offsetof(tsh_attention_layer_desc, head_dim), {LONG, 0, "head_dim"}},
    {offsetof(tsh_attention_layer_desc, qkv_bias), {ENUM, 0, "qkv_bias"}},
    {offsetof(tsh_attention_layer_desc, out_bias), {ENUM, 0, "out_bias"}},
    {offsetof(tsh_attention_layer_desc, rope), {STRUCT, STRUCT_tsh_rope_desc, "rope"}},
    {offsetof(tsh_attention_layer_desc, qk_norm), {STRUCT, STRUCT_tsh_rms_norm_desc, "qk_norm"}},
    {offsetof(tsh_attention_layer_desc, norm_all_heads), {INT, 0, "norm_all_heads"}},
    {offsetof(tsh_attention_layer_desc, attention.causal), {INT, 0, "attention.causal"}},
    {offsetof(tsh_attention_layer_desc, attention.scale), {DOUBLE, 0, "attention.scale"}},
    {offsetof(tsh_attention_layer_desc, attention.dropout), {DOUBLE, 0, "attention.dropout"}},
    {offsetof(tsh_attention_layer_desc, attention.owner), {MODULE, 0, "attention.owner"}},
    {offsetof(tsh_attention_layer_desc, attention.mask), {TENSOR, 0, "attention.mask"}},
    {offsetof(tsh_attention_layer_desc, attention.cache_k), {TENSOR, 0, "attention.cache_k"}},
    {offsetof(tsh_attention_layer_desc, attention.cache_v), {TENSOR, 0, "attention.cache_v"}},
    {offsetof(tsh_attention_layer_desc, attention.past), {LONG, 0, "attention.past"}},
    {offsetof(tsh_attention_layer_desc, attention.pasts), {LONGS, 0, "attention.pasts"}},
    {offsetof(tsh_attention_layer_desc, attention.lengths), {LONGS, 0, "attention.lengths"}},
    {offsetof(tsh_attention_layer_desc, attention.window), {LONG, 0, "attention.window"}},
    {offsetof(tsh_attention_layer_desc, attention.soft_cap), {DOUBLE, 0, "attention.soft_cap"}},
    {offsetof(tsh_attention_layer_desc, attention.sinks), {TENSOR, 0, "attention.sinks"}},
    {offsetof(tsh_attention_layer_desc, attention.segments), {TENSOR, 0, "attention.segments"}},
    {offsetof(tsh_attention_layer_desc, sinks), {INT, 0, "sinks"}},
    {offsetof(tsh_attention_layer_desc, q), {TEXT, 0, "q"}},
    {offsetof(tsh_attention_layer_desc, k), {TEXT, 0, "k"}},
    {offsetof(tsh_attention_layer_desc, v), {TEXT, 0, "v"}},
    {offsetof(tsh_attention_layer_desc, out), {OUTPUT, 0, "out"}},
    {offsetof(tsh_attention_layer_desc, fused), {TEXT, 0, "fused"}},
    {offsetof(tsh_attention_layer_desc, by_group), {INT, 0, "by_group"}},
    {offsetof(tsh_attention_layer_desc, reversed), {INT, 0, "reversed"}},
    {offsetof(tsh_attention_layer_desc, weight_init.kind), {ENUM, 0, "weight_init.kind"}},
    {offsetof(tsh_attention_layer_desc, weight_init.a), {DOUBLE, 0, "weight_init.a"}},
    {offsetof(tsh_attention_layer_desc, weight_init.b), {DOUBLE, 0, "weight_init.b"}},
    {offsetof(tsh_attention_layer_desc, weight_init.gain), {DOUBLE, 0, "weight_init.gain"}},
    {offsetof(tsh_attention_layer_desc, weight_init.fan_out), {INT, 0, "weight_init.fan_out"}},
    {offsetof(tsh_attention_layer_desc, weight_init.low), {DOUBLE, 0, "weight_init.low"}},
    {offsetof(tsh_attention_layer_desc, weight_init.high), {DOUBLE, 0, "weight_init.high"}},
    {offsetof(tsh_attention_layer_desc, bias_init.kind), {ENUM, 0, "bias_init.kind"}},
    {offsetof(tsh_attention_layer_desc, bias_init.a), {DOUBLE, 0, "bias_init.a"}},
    {offsetof(tsh_attention_layer_desc, bias_init.b), {DOUBLE, 0, "bias_init.b"}},
    {offsetof(tsh_attention_layer_desc, bias_init.gain), {DOUBLE, 0, "bias_init.gain"}},
    {offsetof(tsh_attention_layer_desc, bias_init.fan_out), {INT, 0, "bias_init.fan_out"}},
    {offsetof(tsh_attention_layer_desc, bias_init.low), {DOUBLE, 0, "bias_init.low"}},
    {offsetof(tsh_attention_layer_desc, bias_init.high), {DOUBLE, 0, "bias_init.high"}},
    {offsetof(tsh_attention_layer_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_mlp_desc[] = {
    {offsetof(tsh_mlp_desc, dim), {LONG, 0, "dim"}},
    {offsetof(tsh_mlp_desc, hidden), {LONG, 0, "hidden"}},
    {offsetof(tsh_mlp_desc, activation), {ENUM, 0, "activation"}},
    {offsetof(tsh_mlp_desc, gated), {INT, 0, "gated"}},
    {offsetof(tsh_mlp_desc, bias), {ENUM, 0, "bias"}},
    {offsetof(tsh_mlp_desc, gate), {TEXT, 0, "gate"}},
    {offsetof(tsh_mlp_desc, up), {TEXT, 0, "up"}},
    {offsetof(tsh_mlp_desc, down), {TEXT, 0, "down"}},
    {offsetof(tsh_mlp_desc, fused), {TEXT, 0, "fused"}},
    {offsetof(tsh_mlp_desc, reversed), {INT, 0, "reversed"}},
    {offsetof(tsh_mlp_desc, weight_init.kind), {ENUM, 0, "weight_init.kind"}},
    {offsetof(tsh_mlp_desc, weight_init.a), {DOUBLE, 0, "weight_init.a"}},
    {offsetof(tsh_mlp_desc, weight_init.b), {DOUBLE, 0, "weight_init.b"}},
    {offsetof(tsh_mlp_desc, weight_init.gain), {DOUBLE, 0, "weight_init.gain"}},
    {offsetof(tsh_mlp_desc, weight_init.fan_out), {INT, 0, "weight_init.fan_out"}},
    {offsetof(tsh_mlp_desc, weight_init.low), {DOUBLE, 0, "weight_init.low"}},
    {offsetof(tsh_mlp_desc, weight_init.high), {DOUBLE, 0, "weight_init.high"}},
    {offsetof(tsh_mlp_desc, bias_init.kind), {ENUM, 0, "bias_init.kind"}},
    {offsetof(tsh_mlp_desc, bias_init.a), {DOUBLE, 0, "bias_init.a"}},
    {offsetof(tsh_mlp_desc, bias_init.b), {DOUBLE, 0, "bias_init.b"}},
    {offsetof(tsh_mlp_desc, bias_init.gain), {DOUBLE, 0, "bias_init.gain"}},
    {offsetof(tsh_mlp_desc, bias_init.fan_out), {INT, 0, "bias_init.fan_out"}},
    {offsetof(tsh_mlp_desc, bias_init.low), {DOUBLE, 0, "bias_init.low"}},
    {offsetof(tsh_mlp_desc, bias_init.high), {DOUBLE, 0, "bias_init.high"}},
    {offsetof(tsh_mlp_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_policy[] = {
    {offsetof(tsh_policy, name), {TEXT, 0, "name"}},
    {offsetof(tsh_policy, blocks), {TEXT, 0, "blocks"}},
    {offsetof(tsh_policy, attn_qkv), {STRUCT, STRUCT_tsh_policy_layer, "attn_qkv"}},
    {offsetof(tsh_policy, attn_out), {STRUCT, STRUCT_tsh_policy_layer, "attn_out"}},
    {offsetof(tsh_policy, mlp_in), {STRUCT, STRUCT_tsh_policy_layer, "mlp_in"}},
    {offsetof(tsh_policy, mlp_out), {STRUCT, STRUCT_tsh_policy_layer, "mlp_out"}},
    {offsetof(tsh_policy, arguments), {NAMES, 0, "arguments"}},
};

static const api_field fields_of_tsh_conv_options[] = {
    {offsetof(tsh_conv_options, stride), {LONG, 0, "stride"}},
    {offsetof(tsh_conv_options, padding), {LONG, 0, "padding"}},
    {offsetof(tsh_conv_options, output_padding), {LONG, 0, "output_padding"}},
    {offsetof(tsh_conv_options, dilation), {LONG, 0, "dilation"}},
    {offsetof(tsh_conv_options, groups), {LONG, 0, "groups"}},
};

static const api_field fields_of_tsh_pool_options[] = {
    {offsetof(tsh_pool_options, kernel), {LONG, 0, "kernel"}},
    {offsetof(tsh_pool_options, stride), {LONG, 0, "stride"}},
    {offsetof(tsh_pool_options, padding), {LONG, 0, "padding"}},
    {offsetof(tsh_pool_options, dilation), {LONG, 0, "dilation"}},
    {offsetof(tsh_pool_options, ceil_mode), {INT, 0, "ceil_mode"}},
    {offsetof(tsh_pool_options, count_include_pad), {ENUM, 0, "count_include_pad"}},
    {offsetof(tsh_pool_options, divisor_override), {LONG, 0, "divisor_override"}},
};

static const api_field fields_of_tsh_interpolate_options[] = {
    {offsetof(tsh_interpolate_options, size), {LONG, 0, "size"}},
    {offsetof(tsh_interpolate_options, scale), {DOUBLE, 0, "scale"}},
    {offsetof(tsh_interpolate_options, mode), {ENUM, 0, "mode"}},
    {offsetof(tsh_interpolate_options, align_corners), {INT, 0, "align_corners"}},
};

static const api_field fields_of_tsh_conv_desc[] = {
    {offsetof(tsh_conv_desc, in), {LONG, 0, "in"}},
    {offsetof(tsh_conv_desc, out), {LONG, 0, "out"}},
    {offsetof(tsh_conv_desc, kernel), {LONG, 0, "kernel"}},
    {offsetof(tsh_conv_desc, stride), {LONG, 0, "stride"}},
    {offsetof(tsh_conv_desc, padding), {LONG, 0, "padding"}},
    {offsetof(tsh_conv_desc, output_padding), {LONG, 0, "output_padding"}},
    {offsetof(tsh_conv_desc, dilation), {LONG, 0, "dilation"}},
    {offsetof(tsh_conv_desc, groups), {LONG, 0, "groups"}},
    {offsetof(tsh_conv_desc, input), {LAYOUT_AT, 0, "input"}},
    {offsetof(tsh_conv_desc, output), {LAYOUT_AT, 0, "output"}},
    {offsetof(tsh_conv_desc, bias), {ENUM, 0, "bias"}},
    {offsetof(tsh_conv_desc, style), {ENUM, 0, "style"}},
    {offsetof(tsh_conv_desc, unit), {LONG, 0, "unit"}},
    {offsetof(tsh_conv_desc, gather_output), {INT, 0, "gather_output"}},
    {offsetof(tsh_conv_desc, weight_init.kind), {ENUM, 0, "weight_init.kind"}},
    {offsetof(tsh_conv_desc, weight_init.a), {DOUBLE, 0, "weight_init.a"}},
    {offsetof(tsh_conv_desc, weight_init.b), {DOUBLE, 0, "weight_init.b"}},
    {offsetof(tsh_conv_desc, weight_init.gain), {DOUBLE, 0, "weight_init.gain"}},
    {offsetof(tsh_conv_desc, weight_init.fan_out), {INT, 0, "weight_init.fan_out"}},
    {offsetof(tsh_conv_desc, weight_init.low), {DOUBLE, 0, "weight_init.low"}},
    {offsetof(tsh_conv_desc, weight_init.high), {DOUBLE, 0, "weight_init.high"}},
    {offsetof(tsh_conv_desc, bias_init.kind), {ENUM, 0, "bias_init.kind"}},
    {offsetof(tsh_conv_desc, bias_init.a), {DOUBLE, 0, "bias_init.a"}},
    {offsetof(tsh_conv_desc, bias_init.b), {DOUBLE, 0, "bias_init.b"}},
    {offsetof(tsh_conv_desc, bias_init.gain), {DOUBLE, 0, "bias_init.gain"}},
    {offsetof(tsh_conv_desc, bias_init.fan_out), {INT, 0, "bias_init.fan_out"}},
    {offsetof(tsh_conv_desc, bias_init.low), {DOUBLE, 0, "bias_init.low"}},
    {offsetof(tsh_conv_desc, bias_init.high), {DOUBLE, 0, "bias_init.high"}},
    {offsetof(tsh_conv_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_batch_norm_options[] = {
    {offsetof(tsh_batch_norm_options, training), {INT, 0, "training"}},
    {offsetof(tsh_batch_norm_options, momentum), {DOUBLE, 0, "momentum"}},
    {offsetof(tsh_batch_norm_options, eps), {DOUBLE, 0, "eps"}},
    {offsetof(tsh_batch_norm_options, over_dp), {INT, 0, "over_dp"}},
};

static const api_field fields_of_tsh_batch_norm_desc[] = {
    {offsetof(tsh_batch_norm_desc, dim), {LONG, 0, "dim"}},
    {offsetof(tsh_batch_norm_desc, eps), {DOUBLE, 0, "eps"}},
    {offsetof(tsh_batch_norm_desc, momentum), {DOUBLE, 0, "momentum"}},
    {offsetof(tsh_batch_norm_desc, cumulative), {INT, 0, "cumulative"}},
    {offsetof(tsh_batch_norm_desc, affine), {ENUM, 0, "affine"}},
    {offsetof(tsh_batch_norm_desc, running), {ENUM, 0, "running"}},
    {offsetof(tsh_batch_norm_desc, over_dp), {INT, 0, "over_dp"}},
    {offsetof(tsh_batch_norm_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_group_norm_desc[] = {
    {offsetof(tsh_group_norm_desc, groups), {LONG, 0, "groups"}},
    {offsetof(tsh_group_norm_desc, dim), {LONG, 0, "dim"}},
    {offsetof(tsh_group_norm_desc, eps), {DOUBLE, 0, "eps"}},
    {offsetof(tsh_group_norm_desc, affine), {ENUM, 0, "affine"}},
    {offsetof(tsh_group_norm_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_instance_norm_desc[] = {
    {offsetof(tsh_instance_norm_desc, dim), {LONG, 0, "dim"}},
    {offsetof(tsh_instance_norm_desc, eps), {DOUBLE, 0, "eps"}},
    {offsetof(tsh_instance_norm_desc, affine), {ENUM, 0, "affine"}},
    {offsetof(tsh_instance_norm_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_recurrent_desc[] = {
    {offsetof(tsh_recurrent_desc, in), {LONG, 0, "in"}},
    {offsetof(tsh_recurrent_desc, hidden), {LONG, 0, "hidden"}},
    {offsetof(tsh_recurrent_desc, layers), {INT, 0, "layers"}},
    {offsetof(tsh_recurrent_desc, bidirectional), {INT, 0, "bidirectional"}},
    {offsetof(tsh_recurrent_desc, batch_first), {INT, 0, "batch_first"}},
    {offsetof(tsh_recurrent_desc, bias), {ENUM, 0, "bias"}},
    {offsetof(tsh_recurrent_desc, dropout), {DOUBLE, 0, "dropout"}},
    {offsetof(tsh_recurrent_desc, owner), {MODULE, 0, "owner"}},
    {offsetof(tsh_recurrent_desc, sharded), {ENUM, 0, "sharded"}},
    {offsetof(tsh_recurrent_desc, dtype), {DTYPE, 0, "dtype"}},
};

static const api_field fields_of_tsh_schedule[] = {
    {offsetof(tsh_schedule, kind), {ENUM, 0, "kind"}},
    {offsetof(tsh_schedule, lr), {DOUBLE, 0, "lr"}},
    {offsetof(tsh_schedule, lr_min), {DOUBLE, 0, "lr_min"}},
    {offsetof(tsh_schedule, warmup), {LONG, 0, "warmup"}},
    {offsetof(tsh_schedule, total), {LONG, 0, "total"}},
    {offsetof(tsh_schedule, period), {LONG, 0, "period"}},
    {offsetof(tsh_schedule, gamma), {DOUBLE, 0, "gamma"}},
    {offsetof(tsh_schedule, pct_start), {DOUBLE, 0, "pct_start"}},
    {offsetof(tsh_schedule, div_factor), {DOUBLE, 0, "div_factor"}},
    {offsetof(tsh_schedule, final_div_factor), {DOUBLE, 0, "final_div_factor"}},
    {offsetof(tsh_schedule, decay), {LONG, 0, "decay"}},
    {offsetof(tsh_schedule, shape), {ENUM, 0, "shape"}},
    {offsetof(tsh_schedule, factor), {FUNCTION, 10, "factor"}},
    {offsetof(tsh_schedule, user), {USER, 0, "user"}},
};

static const api_field fields_of_tsh_plateau[] = {
    {offsetof(tsh_plateau, lr), {DOUBLE, 0, "lr"}},
    {offsetof(tsh_plateau, factor), {DOUBLE, 0, "factor"}},
    {offsetof(tsh_plateau, patience), {LONG, 0, "patience"}},
    {offsetof(tsh_plateau, threshold), {DOUBLE, 0, "threshold"}},
    {offsetof(tsh_plateau, absolute), {INT, 0, "absolute"}},
    {offsetof(tsh_plateau, largest), {INT, 0, "largest"}},
    {offsetof(tsh_plateau, cooldown), {LONG, 0, "cooldown"}},
    {offsetof(tsh_plateau, lr_min), {DOUBLE, 0, "lr_min"}},
    {offsetof(tsh_plateau, eps), {DOUBLE, 0, "eps"}},
    {offsetof(tsh_plateau, best), {DOUBLE, 0, "best"}},
    {offsetof(tsh_plateau, bad), {LONG, 0, "bad"}},
    {offsetof(tsh_plateau, cooling), {LONG, 0, "cooling"}},
    {offsetof(tsh_plateau, calls), {LONG, 0, "calls"}},
};

static const api_field fields_of_tsh_optim_desc[] = {
    {offsetof(tsh_optim_desc, kind), {ENUM, 0, "kind"}},
    {offsetof(tsh_optim_desc, lr), {DOUBLE, 0, "lr"}},
    {offsetof(tsh_optim_desc, momentum), {DOUBLE, 0, "momentum"}},
    {offsetof(tsh_optim_desc, nesterov), {INT, 0, "nesterov"}},
    {offsetof(tsh_optim_desc, beta1), {DOUBLE, 0, "beta1"}},
    {offsetof(tsh_optim_desc, beta2), {DOUBLE, 0, "beta2"}},
    {offsetof(tsh_optim_desc, eps), {DOUBLE, 0, "eps"}},
    {offsetof(tsh_optim_desc, weight_decay), {DOUBLE, 0, "weight_decay"}},
    {offsetof(tsh_optim_desc, clip_norm), {DOUBLE, 0, "clip_norm"}},
    {offsetof(tsh_optim_desc, zero), {INT, 0, "zero"}},
    {offsetof(tsh_optim_desc, grad_dtype), {DTYPE, 0, "grad_dtype"}},
    {offsetof(tsh_optim_desc, moments_dtype), {DTYPE, 0, "moments_dtype"}},
    {offsetof(tsh_optim_desc, round_weights), {INT, 0, "round_weights"}},
    {offsetof(tsh_optim_desc, schedule), {STRUCT, STRUCT_tsh_schedule, "schedule"}},
    {offsetof(tsh_optim_desc, alpha), {DOUBLE, 0, "alpha"}},
    {offsetof(tsh_optim_desc, centered), {INT, 0, "centered"}},
    {offsetof(tsh_optim_desc, lr_decay), {DOUBLE, 0, "lr_decay"}},
    {offsetof(tsh_optim_desc, momentum_decay), {DOUBLE, 0, "momentum_decay"}},
    {offsetof(tsh_optim_desc, decoupled), {INT, 0, "decoupled"}},
    {offsetof(tsh_optim_desc, beta2_decay), {DOUBLE, 0, "beta2_decay"}},
    {offsetof(tsh_optim_desc, eps2), {DOUBLE, 0, "eps2"}},
    {offsetof(tsh_optim_desc, d), {DOUBLE, 0, "d"}},
    {offsetof(tsh_optim_desc, ns_coefficients), {DOUBLE, 0, "ns_coefficients"}},
    {offsetof(tsh_optim_desc, ns_steps), {INT, 0, "ns_steps"}},
    {offsetof(tsh_optim_desc, adjust_lr_fn), {ENUM, 0, "adjust_lr_fn"}},
    {offsetof(tsh_optim_desc, custom.name), {TEXT, 0, "custom.name"}},
    {offsetof(tsh_optim_desc, custom.moments), {INT, 0, "custom.moments"}},
    {offsetof(tsh_optim_desc, custom.whole), {INT, 0, "custom.whole"}},
    {offsetof(tsh_optim_desc, custom.update), {FUNCTION, 11, "custom.update"}},
    {offsetof(tsh_optim_desc, custom.user), {USER, 0, "custom.user"}},
};

static const api_field fields_of_tsh_lora_desc[] = {
    {offsetof(tsh_lora_desc, rank), {INT, 0, "rank"}},
    {offsetof(tsh_lora_desc, alpha), {DOUBLE, 0, "alpha"}},
    {offsetof(tsh_lora_desc, dropout), {DOUBLE, 0, "dropout"}},
    {offsetof(tsh_lora_desc, rslora), {INT, 0, "rslora"}},
    {offsetof(tsh_lora_desc, name), {TEXT, 0, "name"}},
    {offsetof(tsh_lora_desc, dtype), {DTYPE, 0, "dtype"}},
    {offsetof(tsh_lora_desc, parts), {STRUCT, STRUCT_tsh_lora_part, "parts"}},
    {offsetof(tsh_lora_desc, part_count), {INT, 0, "part_count"}},
};

static const api_field fields_of_tsh_outer_desc[] = {
    {offsetof(tsh_outer_desc, every), {LONG, 0, "every"}},
    {offsetof(tsh_outer_desc, lr), {DOUBLE, 0, "lr"}},
    {offsetof(tsh_outer_desc, momentum), {DOUBLE, 0, "momentum"}},
    {offsetof(tsh_outer_desc, wire), {DTYPE, 0, "wire"}},
    {offsetof(tsh_outer_desc, fragments), {INT, 0, "fragments"}},
    {offsetof(tsh_outer_desc, delay), {LONG, 0, "delay"}},
    {offsetof(tsh_outer_desc, mix), {DOUBLE, 0, "mix"}},
};

static const api_field fields_of_tsh_pipeline_desc[] = {
    {offsetof(tsh_pipeline_desc, micro_batches), {COUNT, 0, "micro_batches"}},
    {offsetof(tsh_pipeline_desc, counts), {INTS, 0, "counts"}},
    {offsetof(tsh_pipeline_desc, schedule), {ENUM, 0, "schedule"}},
    {offsetof(tsh_pipeline_desc, input), {FUNCTION, 12, "input"}},
    {offsetof(tsh_pipeline_desc, loss), {FUNCTION, 13, "loss"}},
    {offsetof(tsh_pipeline_desc, weight), {FUNCTION, 14, "weight"}},
    {offsetof(tsh_pipeline_desc, user), {USER, 0, "user"}},
};

static const api_field fields_of_tsh_file_desc[] = {
    {offsetof(tsh_file_desc, prefix), {TEXT, 0, "prefix"}},
    {offsetof(tsh_file_desc, dtype), {DTYPE, 0, "dtype"}},
    {offsetof(tsh_file_desc, strict_names), {INT, 0, "strict_names"}},
    {offsetof(tsh_file_desc, strict_dtype), {INT, 0, "strict_dtype"}},
    {offsetof(tsh_file_desc, rename), {STRUCT, STRUCT_tsh_rename, "rename"}},
    {offsetof(tsh_file_desc, ignore), {NAMES, 0, "ignore"}},
    {offsetof(tsh_file_desc, broadcast), {INT, 0, "broadcast"}},
    {offsetof(tsh_file_desc, cache), {TEXT, 0, "cache"}},
    {offsetof(tsh_file_desc, hasher), {STRUCT, STRUCT_tsh_hasher, "hasher"}},
    {offsetof(tsh_file_desc, stamp), {LONG, 0, "stamp"}},
    {offsetof(tsh_file_desc, read_at), {FUNCTION, 15, "read_at"}},
    {offsetof(tsh_file_desc, user), {USER, 0, "user"}},
    {offsetof(tsh_file_desc, ema), {EMA, 0, "ema"}},
    {offsetof(tsh_file_desc, adapter), {TEXT, 0, "adapter"}},
    {offsetof(tsh_file_desc, shard_bytes), {LONG, 0, "shard_bytes"}},
};

static const api_field fields_of_tsh_trace_desc[] = {
    {offsetof(tsh_trace_desc, path), {TEXT, 0, "path"}},
    {offsetof(tsh_trace_desc, print), {FUNCTION, 16, "print"}},
    {offsetof(tsh_trace_desc, now), {FUNCTION, 17, "now"}},
    {offsetof(tsh_trace_desc, user), {USER, 0, "user"}},
    {offsetof(tsh_trace_desc, limit), {LONG, 0, "limit"}},
};

static const api_field fields_of_tsh_policy_layer[] = {
    {offsetof(tsh_policy_layer, weight), {TEXT, 0, "weight"}},
    {offsetof(tsh_policy_layer, bias), {TEXT, 0, "bias"}},
    {offsetof(tsh_policy_layer, n_fused), {INT, 0, "n_fused"}},
    {offsetof(tsh_policy_layer, replace), {ENUM, 0, "replace"}},
    {offsetof(tsh_policy_layer, reversed), {INT, 0, "reversed"}},
    {offsetof(tsh_policy_layer, ignore_checker), {INT, 0, "ignore_checker"}},
    {offsetof(tsh_policy_layer, heads), {STRUCT, STRUCT_tsh_policy_heads, "heads"}},
    {offsetof(tsh_policy_layer, kv), {INT, 0, "kv"}},
};

static const api_field fields_of_tsh_lora_part[] = {
    {offsetof(tsh_lora_part, name), {TEXT, 0, "name"}},
    {offsetof(tsh_lora_part, length), {LONG, 0, "length"}},
};

static const api_field fields_of_tsh_rename[] = {
    {offsetof(tsh_rename, from), {TEXT, 0, "from"}},
    {offsetof(tsh_rename, to), {TEXT, 0, "to"}},
};

static const api_field fields_of_tsh_hasher[] = {
    {offsetof(tsh_hasher, size), {SIZE, 0, "size"}},
    {offsetof(tsh_hasher, begin), {FUNCTION, 18, "begin"}},
    {offsetof(tsh_hasher, add), {FUNCTION, 19, "add"}},
    {offsetof(tsh_hasher, end), {FUNCTION, 20, "end"}},
};

static const api_field fields_of_tsh_policy_heads[] = {
    {offsetof(tsh_policy_heads, heads), {TEXT, 0, "heads"}},
    {offsetof(tsh_policy_heads, kv_heads), {TEXT, 0, "kv_heads"}},
    {offsetof(tsh_policy_heads, hidden), {TEXT, 0, "hidden"}},
};

static const api_struct structs[API_STRUCTS] = {
    {"tsh_coll", sizeof(tsh_coll), fields_of_tsh_coll,
        sizeof fields_of_tsh_coll / sizeof(api_field)},
    {"tsh_desc", sizeof(tsh_desc), fields_of_tsh_desc,
        sizeof fields_of_tsh_desc / sizeof(api_field)},
    {"tsh_init", sizeof(tsh_init), fields_of_tsh_init,
        sizeof fields_of_tsh_init / sizeof(api_field)},
    {"tsh_backward_desc", sizeof(tsh_backward_desc), fields_of_tsh_backward_desc,
        sizeof fields_of_tsh_backward_desc / sizeof(api_field)},
    {"tsh_sampler", sizeof(tsh_sampler), fields_of_tsh_sampler,
        sizeof fields_of_tsh_sampler / sizeof(api_field)},
    {"tsh_lookup_desc", sizeof(tsh_lookup_desc), fields_of_tsh_lookup_desc,
        sizeof fields_of_tsh_lookup_desc / sizeof(api_field)},
    {"tsh_rms_norm_desc", sizeof(tsh_rms_norm_desc), fields_of_tsh_rms_norm_desc,
        sizeof fields_of_tsh_rms_norm_desc / sizeof(api_field)},
    {"tsh_rope_desc", sizeof(tsh_rope_desc), fields_of_tsh_rope_desc,
        sizeof fields_of_tsh_rope_desc / sizeof(api_field)},
    {"tsh_attention_desc", sizeof(tsh_attention_desc), fields_of_tsh_attention_desc,
        sizeof fields_of_tsh_attention_desc / sizeof(api_field)},
    {"tsh_cross_entropy_desc", sizeof(tsh_cross_entropy_desc), fields_of_tsh_cross_entropy_desc,
        sizeof fields_of_tsh_cross_entropy_desc / sizeof(api_field)},
    {"tsh_chunks_desc", sizeof(tsh_chunks_desc), fields_of_tsh_chunks_desc,
        sizeof fields_of_tsh_chunks_desc / sizeof(api_field)},
    {"tsh_sample_desc", sizeof(tsh_sample_desc), fields_of_tsh_sample_desc,
        sizeof fields_of_tsh_sample_desc / sizeof(api_field)},
    {"tsh_custom_op_desc", sizeof(tsh_custom_op_desc), fields_of_tsh_custom_op_desc,
        sizeof fields_of_tsh_custom_op_desc / sizeof(api_field)},
    {"tsh_loss_desc", sizeof(tsh_loss_desc), fields_of_tsh_loss_desc,
        sizeof fields_of_tsh_loss_desc / sizeof(api_field)},
    {"tsh_module_desc", sizeof(tsh_module_desc), fields_of_tsh_module_desc,
        sizeof fields_of_tsh_module_desc / sizeof(api_field)},
    {"tsh_layer_norm_desc", sizeof(tsh_layer_norm_desc), fields_of_tsh_layer_norm_desc,
        sizeof fields_of_tsh_layer_norm_desc / sizeof(api_field)},
    {"tsh_param_desc", sizeof(tsh_param_desc), fields_of_tsh_param_desc,
        sizeof fields_of_tsh_param_desc / sizeof(api_field)},
    {"tsh_plan_rule", sizeof(tsh_plan_rule), fields_of_tsh_plan_rule,
        sizeof fields_of_tsh_plan_rule / sizeof(api_field)},
    {"tsh_linear_desc", sizeof(tsh_linear_desc), fields_of_tsh_linear_desc,
        sizeof fields_of_tsh_linear_desc / sizeof(api_field)},
    {"tsh_classifier_desc", sizeof(tsh_classifier_desc), fields_of_tsh_classifier_desc,
        sizeof fields_of_tsh_classifier_desc / sizeof(api_field)},
    {"tsh_embedding_desc", sizeof(tsh_embedding_desc), fields_of_tsh_embedding_desc,
        sizeof fields_of_tsh_embedding_desc / sizeof(api_field)},
    {"tsh_attention_layer_desc", sizeof(tsh_attention_layer_desc),
        fields_of_tsh_attention_layer_desc,
        sizeof fields_of_tsh_attention_layer_desc / sizeof(api_field)},
    {"tsh_mlp_desc", sizeof(tsh_mlp_desc), fields_of_tsh_mlp_desc,
        sizeof fields_of_tsh_mlp_desc / sizeof(api_field)},
    {"tsh_policy", sizeof(tsh_policy), fields_of_tsh_policy,
        sizeof fields_of_tsh_policy / sizeof(api_field)},
    {"tsh_conv_options", sizeof(tsh_conv_options), fields_of_tsh_conv_options,
        sizeof fields_of_tsh_conv_options / sizeof(api_field)},
    {"tsh_pool_options", sizeof(tsh_pool_options), fields_of_tsh_pool_options,
        sizeof fields_of_tsh_pool_options / sizeof(api_field)},
    {"tsh_interpolate_options", sizeof(tsh_interpolate_options),
        fields_of_tsh_interpolate_options,
        sizeof fields_of_tsh_interpolate_options / sizeof(api_field)},
    {"tsh_conv_desc", sizeof(tsh_conv_desc), fields_of_tsh_conv_desc,
        sizeof fields_of_tsh_conv_desc / sizeof(api_field)},
    {"tsh_batch_norm_options", sizeof(tsh_batch_norm_options), fields_of_tsh_batch_norm_options,
        sizeof fields_of_tsh_batch_norm_options / sizeof(api_field)},
    {"tsh_batch_norm_desc", sizeof(tsh_batch_norm_desc), fields_of_tsh_batch_norm_desc,
        sizeof fields_of_tsh_batch_norm_desc / sizeof(api_field)},
    {"tsh_group_norm_desc", sizeof(tsh_group_norm_desc), fields_of_tsh_group_norm_desc,
        sizeof fields_of_tsh_group_norm_desc / sizeof(api_field)},
    {"tsh_instance_norm_desc", sizeof(tsh_instance_norm_desc), fields_of_tsh_instance_norm_desc,
        sizeof fields_of_tsh_instance_norm_desc / sizeof(api_field)},
    {"tsh_recurrent_desc", sizeof(tsh_recurrent_desc), fields_of_tsh_recurrent_desc,
        sizeof fields_of_tsh_recurrent_desc / sizeof(api_field)},
    {"tsh_schedule", sizeof(tsh_schedule), fields_of_tsh_schedule,
        sizeof fields_of_tsh_schedule / sizeof(api_field)},
    {"tsh_plateau", sizeof(tsh_plateau), fields_of_tsh_plateau,
        sizeof fields_of_tsh_plateau / sizeof(api_field)},
    {"tsh_optim_desc", sizeof(tsh_optim_desc), fields_of_tsh_optim_desc,
        sizeof fields_of_tsh_optim_desc / sizeof(api_field)},
    {"tsh_lora_desc", sizeof(tsh_lora_desc), fields_of_tsh_lora_desc,
        sizeof fields_of_tsh_lora_desc / sizeof(api_field)},
    {"tsh_outer_desc", sizeof(tsh_outer_desc), fields_of_tsh_outer_desc,
        sizeof fields_of_tsh_outer_desc / sizeof(api_field)},
    {"tsh_pipeline_desc", sizeof(tsh_pipeline_desc), fields_of_tsh_pipeline_desc,
        sizeof fields_of_tsh_pipeline_desc / sizeof(api_field)},
    {"tsh_file_desc", sizeof(tsh_file_desc), fields_of_tsh_file_desc,
        sizeof fields_of_tsh_file_desc / sizeof(api_field)},
    {"tsh_trace_desc", sizeof(tsh_trace_desc), fields_of_tsh_trace_desc,
        sizeof fields_of_tsh_trace_desc / sizeof(api_field)},
    {"tsh_policy_layer", sizeof(tsh_policy_layer), fields_of_tsh_policy_layer,
        sizeof fields_of_tsh_policy_layer / sizeof(api_field)},
    {"tsh_lora_part", sizeof(tsh_lora_part), fields_of_tsh_lora_part,
        sizeof fields_of_tsh_lora_part / sizeof(api_field)},
    {"tsh_rename", sizeof(tsh_rename), fields_of_tsh_rename,
        sizeof fields_of_tsh_rename / sizeof(api_field)},
    {"tsh_hasher", sizeof(tsh_hasher), fields_of_tsh_hasher,
        sizeof fields_of_tsh_hasher / sizeof(api_field)},
    {"tsh_policy_heads", sizeof(tsh_policy_heads), fields_of_tsh_policy_heads,
        sizeof fields_of_tsh_policy_heads / sizeof(api_field)},
};

static const api_function stubs[] = {
    (api_function)stub_tsh_run_fn,
    (api_function)stub_tsh_run_built_fn,
    (api_function)stub_tsh_run_on_fn,
    (api_function)stub_tsh_run_on_built_fn,
    (api_function)stub_tsh_each_param_fn,
    (api_function)stub_tsh_gradcheck_fn,
    (api_function)stub_tsh_chunks_desc_fn,
    (api_function)stub_tsh_custom_op_desc_forward,
    (api_function)stub_tsh_custom_op_desc_backward,
    (api_function)stub_tsh_module_desc_forward,
    (api_function)stub_tsh_schedule_factor,
    (api_function)stub_tsh_custom_optim_update,
    (api_function)stub_tsh_pipeline_desc_input,
    (api_function)stub_tsh_pipeline_desc_loss,
    (api_function)stub_tsh_pipeline_desc_weight,
    (api_function)stub_tsh_file_desc_read_at,
    (api_function)stub_tsh_trace_desc_print,
    (api_function)stub_tsh_trace_desc_now,
    (api_function)stub_tsh_hasher_begin,
    (api_function)stub_tsh_hasher_add,
    (api_function)stub_tsh_hasher_end,
};

static void call_tsh_dtype_size(void *const *a) { (void)tsh_dtype_size(*(tsh_dtype *)a[0]); }
static void call_tsh_replicated(void *const *a) { (void)a; (void)tsh_replicated(); }
static void call_tsh_partial(void *const *a) { (void)a; (void)tsh_partial(); }
static void call_tsh_sharded(void *const *a) { (void)tsh_sharded(*(int *)a[0]); }
static void call_tsh_shard_units(void *const *a) { (void)tsh_shard_units(*(int *)a[0],
    *(int64_t *)a[1]); }
static void call_tsh_shard_segments(void *const *a) { (void)tsh_shard_segments(*(int *)a[0],
    *(int *)a[1], *(int64_t *)a[2]); }
static void call_tsh_shard_range(void *const *a) { (void)tsh_shard_range(*(tsh_layout *)a[0],
    *(int64_t *)a[1], *(int *)a[2], *(int *)a[3], *(tsh_range **)a[4]); }
static void call_tsh_tp_shard_range(void *const *a) { (void)tsh_tp_shard_range(*(tsh_ctx **)a[0],
    *(tsh_layout *)a[1], *(int64_t *)a[2], *(int *)a[3], *(tsh_range **)a[4]); }
static void call_tsh_layout_text(void *const *a) { use_text(tsh_layout_text(*(tsh_layout *)a[0],
    *(char **)a[1], *(size_t *)a[2])); }
static void call_tsh_allreduce(void *const *a) { (void)tsh_allreduce(*(tsh_comm **)a[0],
    *(void **)a[1], *(int64_t *)a[2], *(tsh_dtype *)a[3], *(tsh_redop *)a[4]); }
static void call_tsh_allgather(void *const *a) { (void)tsh_allgather(*(tsh_comm **)a[0],
    *(const void **)a[1], *(void **)a[2], *(const int64_t **)a[3], *(int64_t *)a[4],
    *(tsh_dtype *)a[5]); }
static void call_tsh_reduce_scatter(void *const *a) { (void)tsh_reduce_scatter(*(tsh_comm **)a[0],
    *(const void **)a[1], *(void **)a[2], *(const int64_t **)a[3], *(int64_t *)a[4],
    *(tsh_dtype *)a[5], *(tsh_redop *)a[6]); }
static void call_tsh_broadcast(void *const *a) { (void)tsh_broadcast(*(tsh_comm **)a[0],
    *(void **)a[1], *(int64_t *)a[2], *(tsh_dtype *)a[3], *(int *)a[4]); }
static void call_tsh_alltoall(void *const *a) { (void)tsh_alltoall(*(tsh_comm **)a[0],
    *(const void **)a[1], *(const int64_t **)a[2], *(void **)a[3], *(const int64_t **)a[4],
    *(int64_t *)a[5], *(tsh_dtype *)a[6]); }
static void call_tsh_send(void *const *a) { (void)tsh_send(*(tsh_comm **)a[0],
    *(const void **)a[1], *(int64_t *)a[2], *(tsh_dtype *)a[3], *(int *)a[4]); }
static void call_tsh_recv(void *const *a) { (void)tsh_recv(*(tsh_comm **)a[0], *(void **)a[1],
    *(int64_t *)a[2], *(tsh_dtype *)a[3], *(int *)a[4]); }
static void call_tsh_sendrecv(void *const *a) { (void)tsh_sendrecv(*(tsh_comm **)a[0],
    *(const void **)a[1], *(int64_t *)a[2], *(int *)a[3], *(void **)a[4], *(int64_t *)a[5],
    *(int *)a[6], *(tsh_dtype *)a[7]); }
static void call_tsh_barrier(void *const *a) { (void)tsh_barrier(*(tsh_comm **)a[0]); }
static void call_tsh_coll_make(void *const *a) { (void)tsh_coll_make(*(tsh_coll_kind *)a[0],
    *(tsh_dtype *)a[1]); }
static void call_tsh_start(void *const *a) { (void)tsh_start(*(tsh_comm **)a[0],
    *(tsh_coll **)a[1], *(tsh_req **)a[2]); }
static void call_tsh_test(void *const *a) { (void)tsh_test(*(tsh_comm **)a[0], *(tsh_req *)a[1],
    *(int **)a[2]); }
static void call_tsh_wait(void *const *a) { (void)tsh_wait(*(tsh_comm **)a[0], *(tsh_req *)a[1]); }
static void call_tsh_allreduce_start(void *const *a) { (void)tsh_allreduce_start
    (*(tsh_comm **)a[0], *(void **)a[1], *(int64_t *)a[2], *(tsh_dtype *)a[3], *(tsh_redop *)a[4],
    *(tsh_req **)a[5]); }
static void call_tsh_comm_progress(void *const *a) { tsh_comm_progress(*(tsh_comm **)a[0]); }
static void call_tsh_comm_split(void *const *a) { (void)tsh_comm_split(*(tsh_comm **)a[0],
    *(int *)a[1], *(int *)a[2], *(tsh_comm **)a[3]); }
static void call_tsh_comm_error(void *const *a) { (void)tsh_comm_error(*(tsh_comm **)a[0],
    *(tsh_error **)a[1]); }
static void call_tsh_comm_abort(void *const *a) { tsh_comm_abort(*(tsh_comm **)a[0],
    *(tsh_result *)a[1], *(const char **)a[2]); }
static void call_tsh_comm_close(void *const *a) { tsh_comm_close(*(tsh_comm **)a[0]); }
static void call_tsh_version(void *const *a) { (void)a; use_text(tsh_version()); }
static void call_tsh_cpu_text(void *const *a) { use_text(tsh_cpu_text(*(const tsh_ctx **)a[0])); }
static void call_tsh_result_name(void *const *a) { use_text(tsh_result_name(*(tsh_result *)a[0])); }
static void call_tsh_result_text(void *const *a) { use_text(tsh_result_text(*(tsh_result *)a[0])); }
static void call_tsh_ok(void *const *a) { (void)tsh_ok(*(tsh_ctx **)a[0]); }
static void call_tsh_last_error(void *const *a) { (void)tsh_last_error(*(const tsh_ctx **)a[0]); }
static void call_tsh_clear_error(void *const *a) { tsh_clear_error(*(tsh_ctx **)a[0]); }
static void call_tsh_fail(void *const *a) { (void)tsh_fail(*(tsh_ctx **)a[0], *(tsh_result *)a[1],
    *(const char **)a[2], 1); }
static void call_tsh_set_place(void *const *a) { (void)tsh_set_place(*(tsh_ctx **)a[0],
    *(const char **)a[1], *(int *)a[2]); }
static void call_tsh_log_stderr(void *const *a) { tsh_log_stderr(*(const char **)a[0],
    *(void **)a[1]); }
static void call_tsh_log_message(void *const *a) { tsh_log_message(*(const tsh_logger **)a[0],
    *(const char **)a[1], 1); }
static void call_tsh_error_set(void *const *a) { (void)tsh_error_set(*(tsh_error **)a[0],
    *(tsh_result *)a[1], *(int *)a[2], *(const char **)a[3], 1); }
static void call_tsh_text_add(void *const *a) { tsh_text_add(*(char **)a[0], *(size_t *)a[1],
    *(const char **)a[2], 1); }
static void call_tsh_now(void *const *a) { (void)a; (void)tsh_now(); }
static void call_tsh_mem_stats(void *const *a) { (void)tsh_mem_stats(*(const tsh_ctx **)a[0]); }
static void call_tsh_dry_run(void *const *a) { tsh_dry_run(*(tsh_ctx **)a[0], *(int *)a[1]); }
static void call_tsh_open(void *const *a) { (void)tsh_open(*(const tsh_desc **)a[0],
    *(tsh_ctx ***)a[1]); }
static void call_tsh_open_built(void *const *a) { (void)tsh_open_built(*(int *)a[0],
    *(size_t *)a[1], *(size_t *)a[2], *(const tsh_desc **)a[3], *(tsh_ctx ***)a[4]); }
static void call_tsh_close(void *const *a) { tsh_close(*(tsh_ctx **)a[0]); }
static void call_tsh_world(void *const *a) { (void)tsh_world(*(tsh_ctx **)a[0]); }
static void call_tsh_tp(void *const *a) { (void)tsh_tp(*(tsh_ctx **)a[0]); }
static void call_tsh_pp(void *const *a) { (void)tsh_pp(*(tsh_ctx **)a[0]); }
static void call_tsh_dp(void *const *a) { (void)tsh_dp(*(tsh_ctx **)a[0]); }
static void call_tsh_run(void *const *a) { (void)tsh_run(*(const tsh_desc **)a[0], *(int
    (**)(tsh_ctx *ctx, void *user))a[1], *(void **)a[2]); }
static void call_tsh_run_built(void *const *a) { (void)tsh_run_built(*(int *)a[0],
    *(size_t *)a[1], *(size_t *)a[2], *(const tsh_desc **)a[3], *(int (**)(tsh_ctx *ctx,
    void *user))a[4], *(void **)a[5]); }
static void call_tsh_run_on(void *const *a) { (void)tsh_run_on(*(tsh_comm **)a[0],
    *(const tsh_desc **)a[1], *(int (**)(tsh_ctx *ctx, void *user))a[2], *(void **)a[3],
    *(tsh_error **)a[4]); }
static void call_tsh_run_on_built(void *const *a) { (void)tsh_run_on_built(*(int *)a[0],
    *(size_t *)a[1], *(size_t *)a[2], *(tsh_comm **)a[3], *(const tsh_desc **)a[4], *(int
    (**)(tsh_ctx *ctx, void *user))a[5], *(void **)a[6], *(tsh_error **)a[7]); }
static void call_tsh_shape0(void *const *a) { (void)a; (void)tsh_shape0(); }
static void call_tsh_shape1(void *const *a) { (void)tsh_shape1(*(int64_t *)a[0]); }
static void call_tsh_shape2(void *const *a) { (void)tsh_shape2(*(int64_t *)a[0],
    *(int64_t *)a[1]); }
static void call_tsh_shape3(void *const *a) { (void)tsh_shape3(*(int64_t *)a[0], *(int64_t *)a[1],
    *(int64_t *)a[2]); }
static void call_tsh_shape4(void *const *a) { (void)tsh_shape4(*(int64_t *)a[0], *(int64_t *)a[1],
    *(int64_t *)a[2], *(int64_t *)a[3]); }
static void call_tsh_tensor_new(void *const *a) { (void)tsh_tensor_new(*(tsh_ctx **)a[0],
    *(tsh_dtype *)a[1], *(tsh_shape *)a[2], *(tsh_layout *)a[3]); }
static void call_tsh_tensor_from(void *const *a) { (void)tsh_tensor_from(*(tsh_ctx **)a[0],
    *(tsh_dtype *)a[1], *(tsh_shape *)a[2], *(tsh_layout *)a[3], *(const void **)a[4]); }
static void call_tsh_tensor_free(void *const *a) { tsh_tensor_free(*(tsh_tensor **)a[0]); }
static void call_tsh_zeros(void *const *a) { (void)tsh_zeros(*(tsh_ctx **)a[0],
    *(tsh_shape *)a[1]); }
static void call_tsh_ones(void *const *a) { (void)tsh_ones(*(tsh_ctx **)a[0], *(tsh_shape *)a[1]); }
static void call_tsh_full(void *const *a) { (void)tsh_full(*(tsh_ctx **)a[0], *(tsh_shape *)a[1],
    *(double *)a[2]); }
static void call_tsh_arange(void *const *a) { (void)tsh_arange(*(tsh_ctx **)a[0],
    *(tsh_dtype *)a[1], *(double *)a[2], *(double *)a[3], *(double *)a[4]); }
static void call_tsh_randn(void *const *a) { (void)tsh_randn(*(tsh_ctx **)a[0],
    *(tsh_shape *)a[1]); }
static void call_tsh_uniform(void *const *a) { (void)tsh_uniform(*(tsh_ctx **)a[0],
    *(tsh_shape *)a[1], *(double *)a[2], *(double *)a[3]); }
static void call_tsh_ctx_of(void *const *a) { (void)tsh_ctx_of(*(const tsh_tensor **)a[0]); }
static void call_tsh_dtype_of(void *const *a) { (void)tsh_dtype_of(*(const tsh_tensor **)a[0]); }
static void call_tsh_ndim(void *const *a) { (void)tsh_ndim(*(const tsh_tensor **)a[0]); }
static void call_tsh_shape_of(void *const *a) { (void)tsh_shape_of(*(const tsh_tensor **)a[0]); }
static void call_tsh_size(void *const *a) { (void)tsh_size(*(const tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_local_size(void *const *a) { (void)tsh_local_size(*(const tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_stride(void *const *a) { (void)tsh_stride(*(const tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_numel(void *const *a) { (void)tsh_numel(*(const tsh_tensor **)a[0]); }
static void call_tsh_local_numel(void *const *a) { (void)tsh_local_numel
    (*(const tsh_tensor **)a[0]); }
static void call_tsh_layout_of(void *const *a) { (void)tsh_layout_of(*(const tsh_tensor **)a[0]); }
static void call_tsh_data(void *const *a) { (void)tsh_data(*(tsh_ctx **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_item(void *const *a) { (void)tsh_item(*(tsh_ctx **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_init_uniform(void *const *a) { (void)tsh_init_uniform(*(tsh_tensor **)a[0],
    *(const tsh_init **)a[1]); }
static void call_tsh_init_normal(void *const *a) { (void)tsh_init_normal(*(tsh_tensor **)a[0],
    *(const tsh_init **)a[1]); }
static void call_tsh_init_trunc_normal(void *const *a) { (void)tsh_init_trunc_normal
    (*(tsh_tensor **)a[0], *(const tsh_init **)a[1]); }
static void call_tsh_init_constant(void *const *a) { (void)tsh_init_constant(*(tsh_tensor **)a[0],
    *(const tsh_init **)a[1]); }
static void call_tsh_init_zeros(void *const *a) { (void)tsh_init_zeros(*(tsh_tensor **)a[0],
    *(const tsh_init **)a[1]); }
static void call_tsh_init_ones(void *const *a) { (void)tsh_init_ones(*(tsh_tensor **)a[0],
    *(const tsh_init **)a[1]); }
static void call_tsh_init_kaiming_uniform(void *const *a) { (void)tsh_init_kaiming_uniform
    (*(tsh_tensor **)a[0], *(const tsh_init **)a[1]); }
static void call_tsh_init_kaiming_normal(void *const *a) { (void)tsh_init_kaiming_normal
    (*(tsh_tensor **)a[0], *(const tsh_init **)a[1]); }
static void call_tsh_init_xavier_uniform(void *const *a) { (void)tsh_init_xavier_uniform
    (*(tsh_tensor **)a[0], *(const tsh_init **)a[1]); }
static void call_tsh_init_xavier_normal(void *const *a) { (void)tsh_init_xavier_normal
    (*(tsh_tensor **)a[0], *(const tsh_init **)a[1]); }
static void call_tsh_init_orthogonal(void *const *a) { (void)tsh_init_orthogonal
    (*(tsh_tensor **)a[0], *(const tsh_init **)a[1]); }
static void call_tsh_init_dirac(void *const *a) { (void)tsh_init_dirac(*(tsh_tensor **)a[0],
    *(const tsh_init **)a[1]); }
static void call_tsh_no_grad_begin(void *const *a) { tsh_no_grad_begin(*(tsh_ctx **)a[0]); }
static void call_tsh_no_grad_end(void *const *a) { tsh_no_grad_end(*(tsh_ctx **)a[0]); }
static void call_tsh_requires_grad(void *const *a) { (void)tsh_requires_grad(*(tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_average_grad(void *const *a) { (void)tsh_average_grad(*(tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_retain_grad(void *const *a) { (void)tsh_retain_grad(*(tsh_tensor **)a[0]); }
static void call_tsh_backward(void *const *a) { (void)tsh_backward(*(tsh_ctx **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_backward_with(void *const *a) { (void)tsh_backward_with(*(tsh_ctx **)a[0],
    *(tsh_tensor **)a[1], *(const tsh_backward_desc **)a[2]); }
static void call_tsh_sync_grads(void *const *a) { (void)tsh_sync_grads(*(tsh_ctx **)a[0]); }
static void call_tsh_grad(void *const *a) { (void)tsh_grad(*(tsh_tensor **)a[0]); }
static void call_tsh_zero_grad(void *const *a) { tsh_zero_grad(*(tsh_tensor **)a[0]); }
static void call_tsh_tape_dump(void *const *a) { (void)tsh_tape_dump(*(tsh_ctx **)a[0],
    *(FILE **)a[1]); }
static void call_tsh_tape_dot(void *const *a) { (void)tsh_tape_dot(*(tsh_ctx **)a[0],
    *(FILE **)a[1]); }
static void call_tsh_detect_anomaly(void *const *a) { tsh_detect_anomaly(*(tsh_ctx **)a[0],
    *(int *)a[1]); }
static void call_tsh_step_end(void *const *a) { (void)tsh_step_end(*(tsh_ctx **)a[0]); }
static void call_tsh_scope_begin(void *const *a) { tsh_scope_begin(*(tsh_ctx **)a[0]); }
static void call_tsh_scope_end(void *const *a) { tsh_scope_end(*(tsh_ctx **)a[0]); }
static void call_tsh_from(void *const *a) { (void)tsh_from(*(tsh_ctx **)a[0],
    *(const void **)a[1], *(tsh_shape *)a[2], *(tsh_dtype *)a[3]); }
static void call_tsh_sampler_next(void *const *a) { (void)tsh_sampler_next(*(tsh_ctx **)a[0],
    *(tsh_sampler **)a[1]); }
static void call_tsh_sampler_index(void *const *a) { (void)tsh_sampler_index(*(tsh_ctx **)a[0],
    *(const tsh_sampler **)a[1], *(int64_t *)a[2]); }
static void call_tsh_check_inputs(void *const *a) { tsh_check_inputs(*(tsh_ctx **)a[0],
    *(int *)a[1]); }
static void call_tsh_add(void *const *a) { (void)tsh_add(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_sub(void *const *a) { (void)tsh_sub(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_mul(void *const *a) { (void)tsh_mul(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_div(void *const *a) { (void)tsh_div(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_pow(void *const *a) { (void)tsh_pow(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_neg(void *const *a) { (void)tsh_neg(*(tsh_tensor **)a[0]); }
static void call_tsh_scale(void *const *a) { (void)tsh_scale(*(tsh_tensor **)a[0],
    *(double *)a[1]); }
static void call_tsh_add_scalar(void *const *a) { (void)tsh_add_scalar(*(tsh_tensor **)a[0],
    *(double *)a[1]); }
static void call_tsh_pow_scalar(void *const *a) { (void)tsh_pow_scalar(*(tsh_tensor **)a[0],
    *(double *)a[1]); }
static void call_tsh_maximum(void *const *a) { (void)tsh_maximum(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_minimum(void *const *a) { (void)tsh_minimum(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_clamp(void *const *a) { (void)tsh_clamp(*(tsh_tensor **)a[0],
    *(double *)a[1], *(double *)a[2]); }
static void call_tsh_exp(void *const *a) { (void)tsh_exp(*(tsh_tensor **)a[0]); }
static void call_tsh_expm1(void *const *a) { (void)tsh_expm1(*(tsh_tensor **)a[0]); }
static void call_tsh_log(void *const *a) { (void)tsh_log(*(tsh_tensor **)a[0]); }
static void call_tsh_log1p(void *const *a) { (void)tsh_log1p(*(tsh_tensor **)a[0]); }
static void call_tsh_sqrt(void *const *a) { (void)tsh_sqrt(*(tsh_tensor **)a[0]); }
static void call_tsh_rsqrt(void *const *a) { (void)tsh_rsqrt(*(tsh_tensor **)a[0]); }
static void call_tsh_reciprocal(void *const *a) { (void)tsh_reciprocal(*(tsh_tensor **)a[0]); }
static void call_tsh_sin(void *const *a) { (void)tsh_sin(*(tsh_tensor **)a[0]); }
static void call_tsh_cos(void *const *a) { (void)tsh_cos(*(tsh_tensor **)a[0]); }
static void call_tsh_abs(void *const *a) { (void)tsh_abs(*(tsh_tensor **)a[0]); }
static void call_tsh_sign(void *const *a) { (void)tsh_sign(*(tsh_tensor **)a[0]); }
static void call_tsh_floor(void *const *a) { (void)tsh_floor(*(tsh_tensor **)a[0]); }
static void call_tsh_ceil(void *const *a) { (void)tsh_ceil(*(tsh_tensor **)a[0]); }
static void call_tsh_round(void *const *a) { (void)tsh_round(*(tsh_tensor **)a[0]); }
static void call_tsh_erf(void *const *a) { (void)tsh_erf(*(tsh_tensor **)a[0]); }
static void call_tsh_sigmoid(void *const *a) { (void)tsh_sigmoid(*(tsh_tensor **)a[0]); }
static void call_tsh_tanh(void *const *a) { (void)tsh_tanh(*(tsh_tensor **)a[0]); }
static void call_tsh_relu(void *const *a) { (void)tsh_relu(*(tsh_tensor **)a[0]); }
static void call_tsh_relu6(void *const *a) { (void)tsh_relu6(*(tsh_tensor **)a[0]); }
static void call_tsh_gelu(void *const *a) { (void)tsh_gelu(*(tsh_tensor **)a[0]); }
static void call_tsh_gelu_tanh(void *const *a) { (void)tsh_gelu_tanh(*(tsh_tensor **)a[0]); }
static void call_tsh_silu(void *const *a) { (void)tsh_silu(*(tsh_tensor **)a[0]); }
static void call_tsh_mish(void *const *a) { (void)tsh_mish(*(tsh_tensor **)a[0]); }
static void call_tsh_selu(void *const *a) { (void)tsh_selu(*(tsh_tensor **)a[0]); }
static void call_tsh_hardsigmoid(void *const *a) { (void)tsh_hardsigmoid(*(tsh_tensor **)a[0]); }
static void call_tsh_hardswish(void *const *a) { (void)tsh_hardswish(*(tsh_tensor **)a[0]); }
static void call_tsh_log_sigmoid(void *const *a) { (void)tsh_log_sigmoid(*(tsh_tensor **)a[0]); }
static void call_tsh_softplus(void *const *a) { (void)tsh_softplus(*(tsh_tensor **)a[0],
    *(double *)a[1]); }
static void call_tsh_elu(void *const *a) { (void)tsh_elu(*(tsh_tensor **)a[0], *(double *)a[1]); }
static void call_tsh_leaky_relu(void *const *a) { (void)tsh_leaky_relu(*(tsh_tensor **)a[0],
    *(double *)a[1]); }
static void call_tsh_eq(void *const *a) { (void)tsh_eq(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_ne(void *const *a) { (void)tsh_ne(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_lt(void *const *a) { (void)tsh_lt(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_le(void *const *a) { (void)tsh_le(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_gt(void *const *a) { (void)tsh_gt(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_ge(void *const *a) { (void)tsh_ge(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_where(void *const *a) { (void)tsh_where(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2]); }
static void call_tsh_masked_fill(void *const *a) { (void)tsh_masked_fill(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(double *)a[2]); }
static void call_tsh_cast(void *const *a) { (void)tsh_cast(*(tsh_tensor **)a[0],
    *(tsh_dtype *)a[1]); }
static void call_tsh_dropout(void *const *a) { (void)tsh_dropout(*(tsh_tensor **)a[0],
    *(double *)a[1], *(tsh_module **)a[2]); }
static void call_tsh_clone(void *const *a) { (void)tsh_clone(*(tsh_tensor **)a[0]); }
static void call_tsh_detach(void *const *a) { (void)tsh_detach(*(tsh_tensor **)a[0]); }
static void call_tsh_keep(void *const *a) { (void)tsh_keep(*(const tsh_tensor **)a[0]); }
static void call_tsh_sum(void *const *a) { (void)tsh_sum(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int *)a[2]); }
static void call_tsh_mean(void *const *a) { (void)tsh_mean(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int *)a[2]); }
static void call_tsh_max(void *const *a) { (void)tsh_max(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int *)a[2]); }
static void call_tsh_min(void *const *a) { (void)tsh_min(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int *)a[2]); }
static void call_tsh_argmax(void *const *a) { (void)tsh_argmax(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int *)a[2]); }
static void call_tsh_argmin(void *const *a) { (void)tsh_argmin(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int *)a[2]); }
static void call_tsh_logsumexp(void *const *a) { (void)tsh_logsumexp(*(tsh_tensor **)a[0],
    *(int *)a[1], *(int *)a[2]); }
static void call_tsh_var(void *const *a) { (void)tsh_var(*(tsh_tensor **)a[0], *(int *)a[1],
    *(double *)a[2], *(int *)a[3]); }
static void call_tsh_std(void *const *a) { (void)tsh_std(*(tsh_tensor **)a[0], *(int *)a[1],
    *(double *)a[2], *(int *)a[3]); }
static void call_tsh_norm(void *const *a) { (void)tsh_norm(*(tsh_tensor **)a[0], *(double *)a[1],
    *(int *)a[2], *(int *)a[3]); }
static void call_tsh_prod(void *const *a) { (void)tsh_prod(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int *)a[2]); }
static void call_tsh_cumsum(void *const *a) { (void)tsh_cumsum(*(tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_softmax(void *const *a) { (void)tsh_softmax(*(tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_log_softmax(void *const *a) { (void)tsh_log_softmax(*(tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_reshape(void *const *a) { (void)tsh_reshape(*(tsh_tensor **)a[0],
    *(tsh_shape *)a[1]); }
static void call_tsh_transpose(void *const *a) { (void)tsh_transpose(*(tsh_tensor **)a[0],
    *(int *)a[1], *(int *)a[2]); }
static void call_tsh_permute(void *const *a) { (void)tsh_permute(*(tsh_tensor **)a[0],
    *(const int **)a[1]); }
static void call_tsh_slice(void *const *a) { (void)tsh_slice(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int64_t *)a[2], *(int64_t *)a[3]); }
static void call_tsh_split(void *const *a) { (void)tsh_split(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int *)a[2], *(tsh_tensor ***)a[3]); }
static void call_tsh_concat(void *const *a) { (void)tsh_concat(*(tsh_tensor *const **)a[0],
    *(int *)a[1], *(int *)a[2]); }
static void call_tsh_redistribute(void *const *a) { (void)tsh_redistribute(*(tsh_tensor **)a[0],
    *(tsh_layout *)a[1]); }
static void call_tsh_full_tensor(void *const *a) { (void)tsh_full_tensor(*(tsh_tensor **)a[0]); }
static void call_tsh_set_layout(void *const *a) { (void)tsh_set_layout(*(tsh_tensor **)a[0],
    *(tsh_layout *)a[1]); }
static void call_tsh_tp_copy(void *const *a) { (void)tsh_tp_copy(*(tsh_tensor **)a[0],
    *(tsh_redop *)a[1]); }
static void call_tsh_tp_reduce(void *const *a) { (void)tsh_tp_reduce(*(tsh_tensor **)a[0],
    *(tsh_redop *)a[1]); }
static void call_tsh_tp_scatter(void *const *a) { (void)tsh_tp_scatter(*(tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_tp_gather(void *const *a) { (void)tsh_tp_gather(*(tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_broadcast_batch(void *const *a) { (void)tsh_broadcast_batch
    (*(tsh_tensor **)a[0]); }
static void call_tsh_read(void *const *a) { (void)tsh_read(*(tsh_ctx **)a[0],
    *(tsh_tensor **)a[1], *(tsh_extent *)a[2], *(void **)a[3], *(size_t *)a[4]); }
static void call_tsh_write(void *const *a) { (void)tsh_write(*(tsh_ctx **)a[0],
    *(tsh_tensor **)a[1], *(tsh_extent *)a[2], *(const void **)a[3], *(size_t *)a[4]); }
static void call_tsh_to_string(void *const *a) { use_text(tsh_to_string(*(tsh_tensor **)a[0],
    *(char **)a[1], *(size_t *)a[2])); }
static void call_tsh_matmul(void *const *a) { (void)tsh_matmul(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_linear(void *const *a) { (void)tsh_linear(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2]); }
static void call_tsh_embedding(void *const *a) { (void)tsh_embedding(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(const tsh_lookup_desc **)a[2]); }
static void call_tsh_layer_norm(void *const *a) { (void)tsh_layer_norm(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2], *(double *)a[3]); }
static void call_tsh_rms_norm(void *const *a) { (void)tsh_rms_norm(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(double *)a[2]); }
static void call_tsh_rms_norm_with(void *const *a) { (void)tsh_rms_norm_with(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(const tsh_rms_norm_desc **)a[2]); }
static void call_tsh_rope(void *const *a) { (void)tsh_rope(*(tsh_tensor **)a[0],
    *(const tsh_rope_desc **)a[1]); }
static void call_tsh_attention(void *const *a) { (void)tsh_attention(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2], *(const tsh_attention_desc **)a[3]); }
static void call_tsh_cross_entropy(void *const *a) { (void)tsh_cross_entropy(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(const tsh_cross_entropy_desc **)a[2]); }
static void call_tsh_loss_in_chunks(void *const *a) { (void)tsh_loss_in_chunks
    (*(tsh_tensor **)a[0], *(tsh_tensor **)a[1], *(const tsh_chunks_desc **)a[2]); }
static void call_tsh_sample(void *const *a) { (void)tsh_sample(*(tsh_tensor **)a[0],
    *(const tsh_sample_desc **)a[1]); }
static void call_tsh_custom_op(void *const *a) { (void)tsh_custom_op(*(tsh_ctx **)a[0],
    *(tsh_tensor *const **)a[1], *(int *)a[2], *(tsh_tensor ***)a[3],
    *(const tsh_custom_op_desc **)a[4]); }
static void call_tsh_mse_loss(void *const *a) { (void)tsh_mse_loss(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(const tsh_loss_desc **)a[2]); }
static void call_tsh_l1_loss(void *const *a) { (void)tsh_l1_loss(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(const tsh_loss_desc **)a[2]); }
static void call_tsh_huber_loss(void *const *a) { (void)tsh_huber_loss(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(const tsh_loss_desc **)a[2]); }
static void call_tsh_smooth_l1_loss(void *const *a) { (void)tsh_smooth_l1_loss
    (*(tsh_tensor **)a[0], *(tsh_tensor **)a[1], *(const tsh_loss_desc **)a[2]); }
static void call_tsh_binary_cross_entropy(void *const *a) { (void)tsh_binary_cross_entropy
    (*(tsh_tensor **)a[0], *(tsh_tensor **)a[1], *(const tsh_loss_desc **)a[2]); }
static void call_tsh_binary_cross_entropy_with_logits(void *const *a) {
    (void)tsh_binary_cross_entropy_with_logits(*(tsh_tensor **)a[0], *(tsh_tensor **)a[1],
    *(const tsh_loss_desc **)a[2]); }
static void call_tsh_kl_div(void *const *a) { (void)tsh_kl_div(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(const tsh_loss_desc **)a[2]); }
static void call_tsh_nll_loss(void *const *a) { (void)tsh_nll_loss(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(const tsh_loss_desc **)a[2]); }
static void call_tsh_cosine_similarity(void *const *a) { (void)tsh_cosine_similarity
    (*(tsh_tensor **)a[0], *(tsh_tensor **)a[1], *(int *)a[2], *(double *)a[3]); }
static void call_tsh_stack(void *const *a) { (void)tsh_stack(*(tsh_tensor *const **)a[0],
    *(int *)a[1], *(int *)a[2]); }
static void call_tsh_squeeze(void *const *a) { (void)tsh_squeeze(*(tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_unsqueeze(void *const *a) { (void)tsh_unsqueeze(*(tsh_tensor **)a[0],
    *(int *)a[1]); }
static void call_tsh_expand(void *const *a) { (void)tsh_expand(*(tsh_tensor **)a[0],
    *(tsh_shape *)a[1]); }
static void call_tsh_tile(void *const *a) { (void)tsh_tile(*(tsh_tensor **)a[0],
    *(const int64_t **)a[1], *(int *)a[2]); }
static void call_tsh_repeat_interleave(void *const *a) { (void)tsh_repeat_interleave
    (*(tsh_tensor **)a[0], *(int64_t *)a[1], *(int *)a[2]); }
static void call_tsh_pad(void *const *a) { (void)tsh_pad(*(tsh_tensor **)a[0],
    *(const int64_t **)a[1], *(int *)a[2], *(tsh_pad_mode *)a[3], *(double *)a[4]); }
static void call_tsh_flip(void *const *a) { (void)tsh_flip(*(tsh_tensor **)a[0], *(int *)a[1]); }
static void call_tsh_roll(void *const *a) { (void)tsh_roll(*(tsh_tensor **)a[0], *(int64_t *)a[1],
    *(int *)a[2]); }
static void call_tsh_slice_step(void *const *a) { (void)tsh_slice_step(*(tsh_tensor **)a[0],
    *(int *)a[1], *(int64_t *)a[2], *(int64_t *)a[3], *(int64_t *)a[4]); }
static void call_tsh_tril(void *const *a) { (void)tsh_tril(*(tsh_tensor **)a[0],
    *(int64_t *)a[1]); }
static void call_tsh_triu(void *const *a) { (void)tsh_triu(*(tsh_tensor **)a[0],
    *(int64_t *)a[1]); }
static void call_tsh_one_hot(void *const *a) { (void)tsh_one_hot(*(tsh_tensor **)a[0],
    *(int64_t *)a[1]); }
static void call_tsh_gather(void *const *a) { (void)tsh_gather(*(tsh_tensor **)a[0], *(int *)a[1],
    *(tsh_tensor **)a[2]); }
static void call_tsh_scatter_add(void *const *a) { (void)tsh_scatter_add(*(tsh_tensor **)a[0],
    *(int *)a[1], *(tsh_tensor **)a[2], *(tsh_tensor **)a[3]); }
static void call_tsh_index_select(void *const *a) { (void)tsh_index_select(*(tsh_tensor **)a[0],
    *(int *)a[1], *(tsh_tensor **)a[2]); }
static void call_tsh_topk(void *const *a) { (void)tsh_topk(*(tsh_tensor **)a[0], *(int64_t *)a[1],
    *(int *)a[2], *(int *)a[3], *(tsh_tensor ***)a[4]); }
static void call_tsh_sort(void *const *a) { (void)tsh_sort(*(tsh_tensor **)a[0], *(int *)a[1],
    *(int *)a[2], *(tsh_tensor ***)a[3]); }
static void call_tsh_argsort(void *const *a) { (void)tsh_argsort(*(tsh_tensor **)a[0],
    *(int *)a[1], *(int *)a[2]); }
static void call_tsh_einsum(void *const *a) { (void)tsh_einsum(*(const char **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2]); }
static void call_tsh_root(void *const *a) { (void)tsh_root(*(tsh_ctx **)a[0]); }
static void call_tsh_add_module(void *const *a) { (void)tsh_add_module(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_module_desc **)a[2]); }
static void call_tsh_find(void *const *a) { (void)tsh_find(*(tsh_module **)a[0],
    *(const char **)a[1]); }
static void call_tsh_param(void *const *a) { (void)tsh_param(*(tsh_module **)a[0],
    *(const char **)a[1]); }
static void call_tsh_each_param(void *const *a) { tsh_each_param(*(tsh_module **)a[0], *(void
    (**)(const char *path, tsh_tensor *param, void *user))a[1], *(void **)a[2]); }
static void call_tsh_module_ctx(void *const *a) { (void)tsh_module_ctx
    (*(const tsh_module **)a[0]); }
static void call_tsh_module_path(void *const *a) { use_text(tsh_module_path
    (*(const tsh_module **)a[0])); }
static void call_tsh_child(void *const *a) { (void)tsh_child(*(const tsh_module **)a[0],
    *(int *)a[1]); }
static void call_tsh_tie(void *const *a) { (void)tsh_tie(*(tsh_module **)a[0],
    *(const char **)a[1], *(tsh_tensor **)a[2]); }
static void call_tsh_materialize(void *const *a) { (void)tsh_materialize(*(tsh_module **)a[0]); }
static void call_tsh_reset_parameters(void *const *a) { (void)tsh_reset_parameters
    (*(tsh_module **)a[0]); }
static void call_tsh_to(void *const *a) { (void)tsh_to(*(tsh_module **)a[0], *(tsh_dtype *)a[1]); }
static void call_tsh_train(void *const *a) { tsh_train(*(tsh_module **)a[0], *(int *)a[1]); }
static void call_tsh_training(void *const *a) { (void)tsh_training(*(const tsh_module **)a[0]); }
static void call_tsh_checkpoint(void *const *a) { tsh_checkpoint(*(tsh_module **)a[0],
    *(int *)a[1]); }
static void call_tsh_zero_grads(void *const *a) { tsh_zero_grads(*(tsh_module **)a[0]); }
static void call_tsh_rng_state(void *const *a) { (void)tsh_rng_state(*(tsh_ctx **)a[0],
    *(void **)a[1], *(size_t *)a[2]); }
static void call_tsh_set_rng_state(void *const *a) { (void)tsh_set_rng_state(*(tsh_ctx **)a[0],
    *(const void **)a[1], *(size_t *)a[2]); }
static void call_tsh_add_layer_norm(void *const *a) { (void)tsh_add_layer_norm
    (*(tsh_module **)a[0], *(const char **)a[1], *(const tsh_layer_norm_desc **)a[2]); }
static void call_tsh_add_rms_norm(void *const *a) { (void)tsh_add_rms_norm(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_rms_norm_desc **)a[2]); }
static void call_tsh_add_dropout(void *const *a) { (void)tsh_add_dropout(*(tsh_module **)a[0],
    *(const char **)a[1], *(double *)a[2]); }
static void call_tsh_add_param(void *const *a) { (void)tsh_add_param(*(tsh_module **)a[0],
    *(const char **)a[1], *(tsh_shape *)a[2], *(const tsh_param_desc **)a[3]); }
static void call_tsh_forward_n(void *const *a) { (void)tsh_forward_n(*(tsh_module **)a[0],
    *(tsh_tensor ***)a[1], *(int *)a[2]); }
static void call_tsh_forward(void *const *a) { (void)tsh_forward(*(tsh_module **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_forward_residual(void *const *a) { (void)tsh_forward_residual
    (*(tsh_module **)a[0], *(tsh_tensor ***)a[1], *(tsh_tensor **)a[2]); }
static void call_tsh_parallelize(void *const *a) { (void)tsh_parallelize(*(tsh_module **)a[0],
    *(const tsh_plan_rule **)a[1], *(int *)a[2]); }
static void call_tsh_plan_report(void *const *a) { (void)tsh_plan_report(*(tsh_module **)a[0],
    *(const tsh_plan_rule **)a[1], *(int *)a[2], *(FILE **)a[3]); }
static void call_tsh_summary(void *const *a) { (void)tsh_summary(*(tsh_module **)a[0],
    *(FILE **)a[1]); }
static void call_tsh_add_linear(void *const *a) { (void)tsh_add_linear(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_linear_desc **)a[2]); }
static void call_tsh_add_classifier(void *const *a) { (void)tsh_add_classifier
    (*(tsh_module **)a[0], *(const char **)a[1], *(const tsh_classifier_desc **)a[2]); }
static void call_tsh_add_embedding(void *const *a) { (void)tsh_add_embedding(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_embedding_desc **)a[2]); }
static void call_tsh_add_attention(void *const *a) { (void)tsh_add_attention(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_attention_layer_desc **)a[2]); }
static void call_tsh_set_segments(void *const *a) { (void)tsh_set_segments(*(tsh_module **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_add_mlp(void *const *a) { (void)tsh_add_mlp(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_mlp_desc **)a[2]); }
static void call_tsh_cache_new(void *const *a) { (void)tsh_cache_new(*(tsh_module **)a[0],
    *(int64_t *)a[1], *(int64_t *)a[2], *(tsh_dtype *)a[3]); }
static void call_tsh_cache_free(void *const *a) { tsh_cache_free(*(tsh_cache **)a[0]); }
static void call_tsh_cache_counts(void *const *a) { (void)tsh_cache_counts(*(tsh_cache **)a[0],
    *(const int64_t **)a[1]); }
static void call_tsh_cache_length(void *const *a) { (void)tsh_cache_length
    (*(const tsh_cache **)a[0]); }
static void call_tsh_cache_truncate(void *const *a) { (void)tsh_cache_truncate
    (*(tsh_cache **)a[0], *(int64_t *)a[1]); }
static void call_tsh_set_argument(void *const *a) { (void)tsh_set_argument(*(tsh_module **)a[0],
    *(const char **)a[1], *(int64_t *)a[2]); }
static void call_tsh_argument(void *const *a) { (void)tsh_argument(*(const tsh_module **)a[0],
    *(const char **)a[1]); }
static void call_tsh_local_argument(void *const *a) { (void)tsh_local_argument
    (*(const tsh_module **)a[0], *(const char **)a[1]); }
static void call_tsh_policy_find(void *const *a) { (void)tsh_policy_find(*(const char **)a[0]); }
static void call_tsh_parallelize_policy(void *const *a) { (void)tsh_parallelize_policy
    (*(tsh_module **)a[0], *(const tsh_policy **)a[1]); }
static void call_tsh_conv1d(void *const *a) { (void)tsh_conv1d(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2], *(const tsh_conv_options **)a[3]); }
static void call_tsh_conv2d(void *const *a) { (void)tsh_conv2d(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2], *(const tsh_conv_options **)a[3]); }
static void call_tsh_conv_transpose1d(void *const *a) { (void)tsh_conv_transpose1d
    (*(tsh_tensor **)a[0], *(tsh_tensor **)a[1], *(tsh_tensor **)a[2],
    *(const tsh_conv_options **)a[3]); }
static void call_tsh_conv_transpose2d(void *const *a) { (void)tsh_conv_transpose2d
    (*(tsh_tensor **)a[0], *(tsh_tensor **)a[1], *(tsh_tensor **)a[2],
    *(const tsh_conv_options **)a[3]); }
static void call_tsh_max_pool1d(void *const *a) { (void)tsh_max_pool1d(*(tsh_tensor **)a[0],
    *(const tsh_pool_options **)a[1]); }
static void call_tsh_max_pool2d(void *const *a) { (void)tsh_max_pool2d(*(tsh_tensor **)a[0],
    *(const tsh_pool_options **)a[1]); }
static void call_tsh_avg_pool1d(void *const *a) { (void)tsh_avg_pool1d(*(tsh_tensor **)a[0],
    *(const tsh_pool_options **)a[1]); }
static void call_tsh_avg_pool2d(void *const *a) { (void)tsh_avg_pool2d(*(tsh_tensor **)a[0],
    *(const tsh_pool_options **)a[1]); }
static void call_tsh_adaptive_avg_pool1d(void *const *a) { (void)tsh_adaptive_avg_pool1d
    (*(tsh_tensor **)a[0], *(int64_t *)a[1]); }
static void call_tsh_adaptive_avg_pool2d(void *const *a) { (void)tsh_adaptive_avg_pool2d
    (*(tsh_tensor **)a[0], *(int64_t *)a[1], *(int64_t *)a[2]); }
static void call_tsh_interpolate(void *const *a) { (void)tsh_interpolate(*(tsh_tensor **)a[0],
    *(const tsh_interpolate_options **)a[1]); }
static void call_tsh_pixel_shuffle(void *const *a) { (void)tsh_pixel_shuffle(*(tsh_tensor **)a[0],
    *(int64_t *)a[1]); }
static void call_tsh_add_conv1d(void *const *a) { (void)tsh_add_conv1d(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_conv_desc **)a[2]); }
static void call_tsh_add_conv2d(void *const *a) { (void)tsh_add_conv2d(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_conv_desc **)a[2]); }
static void call_tsh_add_conv_transpose1d(void *const *a) { (void)tsh_add_conv_transpose1d
    (*(tsh_module **)a[0], *(const char **)a[1], *(const tsh_conv_desc **)a[2]); }
static void call_tsh_add_conv_transpose2d(void *const *a) { (void)tsh_add_conv_transpose2d
    (*(tsh_module **)a[0], *(const char **)a[1], *(const tsh_conv_desc **)a[2]); }
static void call_tsh_batch_norm(void *const *a) { (void)tsh_batch_norm(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2], *(tsh_tensor **)a[3], *(tsh_tensor **)a[4],
    *(const tsh_batch_norm_options **)a[5]); }
static void call_tsh_add_batch_norm(void *const *a) { (void)tsh_add_batch_norm
    (*(tsh_module **)a[0], *(const char **)a[1], *(const tsh_batch_norm_desc **)a[2]); }
static void call_tsh_group_norm(void *const *a) { (void)tsh_group_norm(*(tsh_tensor **)a[0],
    *(int64_t *)a[1], *(tsh_tensor **)a[2], *(tsh_tensor **)a[3], *(double *)a[4]); }
static void call_tsh_instance_norm(void *const *a) { (void)tsh_instance_norm(*(tsh_tensor **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2], *(double *)a[3]); }
static void call_tsh_add_group_norm(void *const *a) { (void)tsh_add_group_norm
    (*(tsh_module **)a[0], *(const char **)a[1], *(const tsh_group_norm_desc **)a[2]); }
static void call_tsh_add_instance_norm(void *const *a) { (void)tsh_add_instance_norm
    (*(tsh_module **)a[0], *(const char **)a[1], *(const tsh_instance_norm_desc **)a[2]); }
static void call_tsh_lstm(void *const *a) { (void)tsh_lstm(*(tsh_tensor **)a[0],
    *(tsh_tensor *const **)a[1], *(int *)a[2], *(tsh_tensor **)a[3], *(tsh_tensor **)a[4],
    *(const tsh_recurrent_desc **)a[5], *(tsh_tensor ***)a[6], *(tsh_tensor ***)a[7]); }
static void call_tsh_gru(void *const *a) { (void)tsh_gru(*(tsh_tensor **)a[0],
    *(tsh_tensor *const **)a[1], *(int *)a[2], *(tsh_tensor **)a[3],
    *(const tsh_recurrent_desc **)a[4], *(tsh_tensor ***)a[5]); }
static void call_tsh_add_lstm(void *const *a) { (void)tsh_add_lstm(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_recurrent_desc **)a[2]); }
static void call_tsh_add_gru(void *const *a) { (void)tsh_add_gru(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_recurrent_desc **)a[2]); }
static void call_tsh_lstm_forward(void *const *a) { (void)tsh_lstm_forward(*(tsh_module **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2], *(tsh_tensor **)a[3], *(tsh_tensor ***)a[4],
    *(tsh_tensor ***)a[5]); }
static void call_tsh_gru_forward(void *const *a) { (void)tsh_gru_forward(*(tsh_module **)a[0],
    *(tsh_tensor **)a[1], *(tsh_tensor **)a[2], *(tsh_tensor ***)a[3]); }
static void call_tsh_schedule_lr(void *const *a) { (void)tsh_schedule_lr
    (*(const tsh_schedule **)a[0], *(int64_t *)a[1]); }
static void call_tsh_plateau_step(void *const *a) { (void)tsh_plateau_step(*(tsh_plateau **)a[0],
    *(double *)a[1]); }
static void call_tsh_optim_new(void *const *a) { (void)tsh_optim_new(*(tsh_module **)a[0],
    *(const tsh_optim_desc **)a[1]); }
static void call_tsh_optim_free(void *const *a) { tsh_optim_free(*(tsh_optim **)a[0]); }
static void call_tsh_optim_group(void *const *a) { (void)tsh_optim_group(*(tsh_optim **)a[0],
    *(const char **)a[1], *(double *)a[2], *(double *)a[3]); }
static void call_tsh_optim_group_with(void *const *a) { (void)tsh_optim_group_with
    (*(tsh_optim **)a[0], *(const char **)a[1], *(const tsh_optim_desc **)a[2]); }
static void call_tsh_optim_set_lr(void *const *a) { tsh_optim_set_lr(*(tsh_optim **)a[0],
    *(double *)a[1]); }
static void call_tsh_optim_step(void *const *a) { (void)tsh_optim_step(*(tsh_optim **)a[0]); }
static void call_tsh_optim_state(void *const *a) { (void)tsh_optim_state
    (*(const tsh_optim **)a[0]); }
static void call_tsh_clip_grad_norm(void *const *a) { (void)tsh_clip_grad_norm
    (*(tsh_module **)a[0], *(double *)a[1], *(double **)a[2]); }
static void call_tsh_freeze(void *const *a) { (void)tsh_freeze(*(tsh_module **)a[0],
    *(const char **)a[1]); }
static void call_tsh_unfreeze(void *const *a) { (void)tsh_unfreeze(*(tsh_module **)a[0],
    *(const char **)a[1]); }
static void call_tsh_lora(void *const *a) { (void)tsh_lora(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_lora_desc **)a[2]); }
static void call_tsh_lora_use(void *const *a) { (void)tsh_lora_use(*(tsh_module **)a[0],
    *(const char **)a[1]); }
static void call_tsh_lora_merge(void *const *a) { (void)tsh_lora_merge(*(tsh_module **)a[0]); }
static void call_tsh_lora_unmerge(void *const *a) { (void)tsh_lora_unmerge(*(tsh_module **)a[0]); }
static void call_tsh_lora_free(void *const *a) { (void)tsh_lora_free(*(tsh_module **)a[0],
    *(const char **)a[1]); }
static void call_tsh_ema_new(void *const *a) { (void)tsh_ema_new(*(tsh_module **)a[0],
    *(double *)a[1]); }
static void call_tsh_ema_free(void *const *a) { tsh_ema_free(*(tsh_ema **)a[0]); }
static void call_tsh_ema_update(void *const *a) { (void)tsh_ema_update(*(tsh_ema **)a[0]); }
static void call_tsh_ema_swap(void *const *a) { (void)tsh_ema_swap(*(tsh_ema **)a[0]); }
static void call_tsh_ema_updates(void *const *a) { (void)tsh_ema_updates(*(const tsh_ema **)a[0]); }
static void call_tsh_outer_new(void *const *a) { (void)tsh_outer_new(*(tsh_module **)a[0],
    *(tsh_optim **)a[1], *(const tsh_outer_desc **)a[2]); }
static void call_tsh_outer_step(void *const *a) { (void)tsh_outer_step(*(tsh_outer **)a[0]); }
static void call_tsh_outer_state(void *const *a) { (void)tsh_outer_state
    (*(const tsh_outer **)a[0]); }
static void call_tsh_outer_free(void *const *a) { tsh_outer_free(*(tsh_outer **)a[0]); }
static void call_tsh_quantize(void *const *a) { (void)tsh_quantize(*(tsh_module **)a[0],
    *(const char **)a[1], *(tsh_dtype *)a[2]); }
static void call_tsh_pipeline_new(void *const *a) { (void)tsh_pipeline_new(*(tsh_module **)a[0],
    *(const tsh_pipeline_desc **)a[1]); }
static void call_tsh_pipeline_train(void *const *a) { (void)tsh_pipeline_train
    (*(tsh_pipeline **)a[0], *(double **)a[1]); }
static void call_tsh_pipeline_evaluate(void *const *a) { (void)tsh_pipeline_evaluate
    (*(tsh_pipeline **)a[0], *(int *)a[1], *(double **)a[2]); }
static void call_tsh_save(void *const *a) { (void)tsh_save(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_optim **)a[2]); }
static void call_tsh_save_with(void *const *a) { (void)tsh_save_with(*(tsh_module **)a[0],
    *(const char **)a[1], *(const tsh_optim **)a[2], *(const tsh_file_desc **)a[3]); }
static void call_tsh_load(void *const *a) { (void)tsh_load(*(tsh_module **)a[0],
    *(const char **)a[1], *(tsh_optim **)a[2]); }
static void call_tsh_load_with(void *const *a) { (void)tsh_load_with(*(tsh_module **)a[0],
    *(const char **)a[1], *(tsh_optim **)a[2], *(const tsh_file_desc **)a[3]); }
static void call_tsh_file_open(void *const *a) { use_file(tsh_file_open(*(const char **)a[0],
    *(int64_t *)a[1], *(tsh_error **)a[2])); }
static void call_tsh_writer_open(void *const *a) { (void)tsh_writer_open(*(tsh_writer **)a[0],
    *(const char **)a[1], *(int *)a[2]); }
static void call_tsh_writer_add(void *const *a) { (void)tsh_writer_add(*(tsh_writer **)a[0],
    *(const void **)a[1], *(size_t *)a[2]); }
static void call_tsh_writer_sync(void *const *a) { (void)tsh_writer_sync(*(tsh_writer **)a[0]); }
static void call_tsh_writer_close(void *const *a) { (void)tsh_writer_close(*(tsh_writer **)a[0],
    *(int *)a[1]); }
static void call_tsh_gradcheck(void *const *a) { (void)tsh_gradcheck(*(tsh_ctx **)a[0],
    *(tsh_gradcheck_fn *)a[1], *(tsh_tensor ***)a[2], *(int *)a[3], *(void **)a[4],
    *(double *)a[5], *(int64_t *)a[6]); }
static void call_tsh_check_replicas(void *const *a) { (void)tsh_check_replicas
    (*(tsh_module **)a[0]); }
static void call_tsh_hash(void *const *a) { (void)tsh_hash(*(tsh_ctx **)a[0],
    *(tsh_tensor **)a[1]); }
static void call_tsh_trace_begin(void *const *a) { (void)tsh_trace_begin(*(tsh_ctx **)a[0],
    *(const tsh_trace_desc **)a[1]); }
static void call_tsh_trace_end(void *const *a) { (void)tsh_trace_end(*(tsh_ctx **)a[0]); }
static void call_tsh_profile(void *const *a) { (void)tsh_profile(*(tsh_ctx **)a[0], *(int *)a[1]); }

static const api_call calls[] = {
    {"tsh_dtype_size", call_tsh_dtype_size, 1, {{DTYPE, 0, "dtype"}}},
    {"tsh_replicated", call_tsh_replicated, 0, {{INT, 0, NULL}}},
    {"tsh_partial", call_tsh_partial, 0, {{INT, 0, NULL}}},
    {"tsh_sharded", call_tsh_sharded, 1, {{INT, 0, "dim"}}},
    {"tsh_shard_units", call_tsh_shard_units, 2, {{INT, 0, "dim"}, {LONG, 0, "unit"}}},
    {"tsh_shard_segments", call_tsh_shard_segments, 3, {{INT, 0, "dim"}, {INT, 0, "segments"},
        {LONG, 0, "unit"}}},
    {"tsh_shard_range", call_tsh_shard_range, 5, {{LAYOUT, 0, "layout"}, {LONG, 0, "length"},
        {INT, 0, "size"}, {INT, 0, "rank"}, {RANGES, 0, "ranges"}}},
    {"tsh_tp_shard_range", call_tsh_tp_shard_range, 5, {{CTX, 0, "ctx"}, {LAYOUT, 0, "layout"},
        {LONG, 0, "length"}, {INT, 0, "rank"}, {RANGES, 0, "ranges"}}},
    {"tsh_layout_text", call_tsh_layout_text, 3, {{LAYOUT, 0, "layout"}, {TEXT, 0, "text"}, {SIZE,
        0, "size"}}},
    {"tsh_allreduce", call_tsh_allreduce, 5, {{COMM, 0, "comm"}, {BUFFER, 0, "buffer"}, {LONG, 0,
        "count"}, {DTYPE, 0, "dtype"}, {ENUM, 0, "op"}}},
    {"tsh_allgather", call_tsh_allgather, 6, {{COMM, 0, "comm"}, {BUFFER, 0, "send"}, {OUTPUT, 0,
        "recv"}, {LONGS, 0, "counts"}, {LONG, 0, "blocks"}, {DTYPE, 0, "dtype"}}},
    {"tsh_reduce_scatter", call_tsh_reduce_scatter, 7, {{COMM, 0, "comm"}, {BUFFER, 0, "send"},
        {OUTPUT, 0, "recv"}, {LONGS, 0, "counts"}, {LONG, 0, "blocks"}, {DTYPE, 0, "dtype"},
        {ENUM, 0, "op"}}},
    {"tsh_broadcast", call_tsh_broadcast, 5, {{COMM, 0, "comm"}, {BUFFER, 0, "buffer"}, {LONG, 0,
        "count"}, {DTYPE, 0, "dtype"}, {INT, 0, "root"}}},
    {"tsh_alltoall", call_tsh_alltoall, 7, {{COMM, 0, "comm"}, {BUFFER, 0, "send"}, {LONGS, 0,
        "send_counts"}, {OUTPUT, 0, "recv"}, {LONGS, 0, "recv_counts"}, {LONG, 0, "blocks"},
        {DTYPE, 0, "dtype"}}},
    {"tsh_send", call_tsh_send, 5, {{COMM, 0, "comm"}, {BUFFER, 0, "buffer"}, {LONG, 0, "count"},
        {DTYPE, 0, "dtype"}, {INT, 0, "to"}}},
    {"tsh_recv", call_tsh_recv, 5, {{COMM, 0, "comm"}, {BUFFER, 0, "buffer"}, {LONG, 0, "count"},
        {DTYPE, 0, "dtype"}, {INT, 0, "from"}}},
    {"tsh_sendrecv", call_tsh_sendrecv, 8, {{COMM, 0, "comm"}, {BUFFER, 0, "send"}, {LONG, 0,
        "send_count"}, {INT, 0, "to"}, {OUTPUT, 0, "recv"}, {LONG, 0, "recv_count"}, {INT, 0,
        "from"}, {DTYPE, 0, "dtype"}}},
    {"tsh_barrier", call_tsh_barrier, 1, {{COMM, 0, "comm"}}},
    {"tsh_coll_make", call_tsh_coll_make, 2, {{ENUM, 0, "kind"}, {DTYPE, 0, "dtype"}}},
    {"tsh_start", call_tsh_start, 3, {{COMM, 0, "comm"}, {STRUCT, STRUCT_tsh_coll, "coll"},
        {REQ_AT, 0, "req"}}},
    {"tsh_test", call_tsh_test, 3, {{COMM, 0, "comm"}, {LONG, 0, "req"}, {OUTPUT, 0, "done"}}},
    {"tsh_wait", call_tsh_wait, 2, {{COMM, 0, "comm"}, {LONG, 0, "req"}}},
    {"tsh_allreduce_start", call_tsh_allreduce_start, 6, {{COMM, 0, "comm"}, {BUFFER, 0,
        "buffer"}, {LONG, 0, "count"}, {DTYPE, 0, "dtype"}, {ENUM, 0, "op"}, {REQ_AT, 0, "req"}}},
    {"tsh_comm_progress", call_tsh_comm_progress, 1, {{COMM, 0, "comm"}}},
    {"tsh_comm_split", call_tsh_comm_split, 4, {{COMM, 0, "comm"}, {INT, 0, "color"}, {INT, 0,
        "key"}, {OUT_COMM, 0, "out"}}},
    {"tsh_comm_error", call_tsh_comm_error, 2, {{COMM, 0, "comm"}, {ERROR_AT, 0, "error"}}},
    {"tsh_comm_abort", call_tsh_comm_abort, 3, {{COMM, 0, "comm"}, {ENUM, 0, "code"}, {TEXT, 0,
        "message"}}},
    {"tsh_comm_close", call_tsh_comm_close, 1, {{COMM, 0, "comm"}}},
    {"tsh_version", call_tsh_version, 0, {{INT, 0, NULL}}},
    {"tsh_cpu_text", call_tsh_cpu_text, 1, {{CTX, 0, "ctx"}}},
    {"tsh_result_name", call_tsh_result_name, 1, {{ENUM, 0, "code"}}},
    {"tsh_result_text", call_tsh_result_text, 1, {{ENUM, 0, "code"}}},
    {"tsh_ok", call_tsh_ok, 1, {{CTX, 0, "ctx"}}},
    {"tsh_last_error", call_tsh_last_error, 1, {{CTX, 0, "ctx"}}},
    {"tsh_clear_error", call_tsh_clear_error, 1, {{CTX, 0, "ctx"}}},
    {"tsh_fail", call_tsh_fail, 3, {{CTX, 0, "ctx"}, {ENUM, 0, "code"}, {FORMAT, 0, "format"}}},
    {"tsh_set_place", call_tsh_set_place, 3, {{CTX, 0, "ctx"}, {TEXT, 0, "file"}, {INT, 0,
        "line"}}},
    {"tsh_log_stderr", call_tsh_log_stderr, 2, {{TEXT, 0, "message"}, {USER, 0, "user"}}},
    {"tsh_log_message", call_tsh_log_message, 2, {{LOGGER, 0, "logger"}, {FORMAT, 0, "format"}}},
    {"tsh_error_set", call_tsh_error_set, 4, {{ERROR_AT, 0, "error"}, {ENUM, 0, "code"}, {INT, 0,
        "rank"}, {FORMAT, 0, "format"}}},
    {"tsh_text_add", call_tsh_text_add, 3, {{TEXT, 0, "text"}, {SIZE, 0, "capacity"}, {FORMAT, 0,
        "format"}}},
    {"tsh_now", call_tsh_now, 0, {{INT, 0, NULL}}},
    {"tsh_mem_stats", call_tsh_mem_stats, 1, {{CTX, 0, "ctx"}}},
    {"tsh_dry_run", call_tsh_dry_run, 2, {{CTX, 0, "ctx"}, {INT, 0, "on"}}},
    {"tsh_open", call_tsh_open, 2, {{STRUCT, STRUCT_tsh_desc, "desc"}, {OUT_CTX, 0, "out"}}},
    {"tsh_open_built", call_tsh_open_built, 5, {{INT, 0, "version"}, {SIZE, 0, "real"}, {SIZE, 0,
        "size"}, {STRUCT, STRUCT_tsh_desc, "desc"}, {OUT_CTX, 0, "out"}}},
    {"tsh_close", call_tsh_close, 1, {{CTX, 0, "ctx"}}},
    {"tsh_world", call_tsh_world, 1, {{CTX, 0, "ctx"}}},
    {"tsh_tp", call_tsh_tp, 1, {{CTX, 0, "ctx"}}},
    {"tsh_pp", call_tsh_pp, 1, {{CTX, 0, "ctx"}}},
    {"tsh_dp", call_tsh_dp, 1, {{CTX, 0, "ctx"}}},
    {"tsh_run", call_tsh_run, 3, {{STRUCT, STRUCT_tsh_desc, "desc"}, {FUNCTION, 0, "fn"}, {USER,
        0, "user"}}},
    {"tsh_run_built", call_tsh_run_built, 6, {{INT, 0, "version"}, {SIZE, 0, "real"}, {SIZE, 0,
        "size"}, {STRUCT, STRUCT_tsh_desc, "desc"}, {FUNCTION, 1, "fn"}, {USER, 0, "user"}}},
    {"tsh_run_on", call_tsh_run_on, 5, {{COMM, 0, "comm"}, {STRUCT, STRUCT_tsh_desc, "desc"},
        {FUNCTION, 2, "fn"}, {USER, 0, "user"}, {ERROR_AT, 0, "error"}}},
    {"tsh_run_on_built", call_tsh_run_on_built, 8, {{INT, 0, "version"}, {SIZE, 0, "real"}, {SIZE,
        0, "size"}, {COMM, 0, "comm"}, {STRUCT, STRUCT_tsh_desc, "desc"}, {FUNCTION, 3, "fn"},
        {USER, 0, "user"}, {ERROR_AT, 0, "error"}}},
    {"tsh_shape0", call_tsh_shape0, 0, {{INT, 0, NULL}}},
    {"tsh_shape1", call_tsh_shape1, 1, {{LONG, 0, "a"}}},
    {"tsh_shape2", call_tsh_shape2, 2, {{LONG, 0, "a"}, {LONG, 0, "b"}}},
    {"tsh_shape3", call_tsh_shape3, 3, {{LONG, 0, "a"}, {LONG, 0, "b"}, {LONG, 0, "c"}}},
    {"tsh_shape4", call_tsh_shape4, 4, {{LONG, 0, "a"}, {LONG, 0, "b"}, {LONG, 0, "c"}, {LONG, 0,
        "d"}}},
    {"tsh_tensor_new", call_tsh_tensor_new, 4, {{CTX, 0, "ctx"}, {DTYPE, 0, "dtype"}, {SHAPE, 0,
        "shape"}, {LAYOUT, 0, "layout"}}},
    {"tsh_tensor_from", call_tsh_tensor_from, 5, {{CTX, 0, "ctx"}, {DTYPE, 0, "dtype"}, {SHAPE, 0,
        "shape"}, {LAYOUT, 0, "layout"}, {BUFFER, 0, "data"}}},
    {"tsh_tensor_free", call_tsh_tensor_free, 1, {{TENSOR, 0, "t"}}},
    {"tsh_zeros", call_tsh_zeros, 2, {{CTX, 0, "ctx"}, {SHAPE, 0, "shape"}}},
    {"tsh_ones", call_tsh_ones, 2, {{CTX, 0, "ctx"}, {SHAPE, 0, "shape"}}},
    {"tsh_full", call_tsh_full, 3, {{CTX, 0, "ctx"}, {SHAPE, 0, "shape"}, {DOUBLE, 0, "value"}}},
    {"tsh_arange", call_tsh_arange, 5, {{CTX, 0, "ctx"}, {DTYPE, 0, "dtype"}, {DOUBLE, 0,
        "start"}, {DOUBLE, 0, "stop"}, {DOUBLE, 0, "step"}}},
    {"tsh_randn", call_tsh_randn, 2, {{CTX, 0, "ctx"}, {SHAPE, 0, "shape"}}},
    {"tsh_uniform", call_tsh_uniform, 4, {{CTX, 0, "ctx"}, {SHAPE, 0, "shape"}, {DOUBLE, 0,
        "low"}, {DOUBLE, 0, "high"}}},
    {"tsh_ctx_of", call_tsh_ctx_of, 1, {{TENSOR, 0, "t"}}},
    {"tsh_dtype_of", call_tsh_dtype_of, 1, {{TENSOR, 0, "t"}}},
    {"tsh_ndim", call_tsh_ndim, 1, {{TENSOR, 0, "t"}}},
    {"tsh_shape_of", call_tsh_shape_of, 1, {{TENSOR, 0, "t"}}},
    {"tsh_size", call_tsh_size, 2, {{TENSOR, 0, "t"}, {INT, 0, "dim"}}},
    {"tsh_local_size", call_tsh_local_size, 2, {{TENSOR, 0, "t"}, {INT, 0, "dim"}}},
    {"tsh_stride", call_tsh_stride, 2, {{TENSOR, 0, "t"}, {INT, 0, "dim"}}},
    {"tsh_numel", call_tsh_numel, 1, {{TENSOR, 0, "t"}}},
    {"tsh_local_numel", call_tsh_local_numel, 1, {{TENSOR, 0, "t"}}},
    {"tsh_layout_of", call_tsh_layout_of, 1, {{TENSOR, 0, "t"}}},
    {"tsh_data", call_tsh_data, 2, {{CTX, 0, "ctx"}, {TENSOR, 0, "t"}}},
    {"tsh_item", call_tsh_item, 2, {{CTX, 0, "ctx"}, {TENSOR, 0, "t"}}},
    {"tsh_init_uniform", call_tsh_init_uniform, 2, {{TENSOR, 0, "t"}, {STRUCT, STRUCT_tsh_init,
        "desc"}}},
    {"tsh_init_normal", call_tsh_init_normal, 2, {{TENSOR, 0, "t"}, {STRUCT, STRUCT_tsh_init,
        "desc"}}},
    {"tsh_init_trunc_normal", call_tsh_init_trunc_normal, 2, {{TENSOR, 0, "t"}, {STRUCT,
        STRUCT_tsh_init, "desc"}}},
    {"tsh_init_constant", call_tsh_init_constant, 2, {{TENSOR, 0, "t"}, {STRUCT, STRUCT_tsh_init,
        "desc"}}},
    {"tsh_init_zeros", call_tsh_init_zeros, 2, {{TENSOR, 0, "t"}, {STRUCT, STRUCT_tsh_init,
        "desc"}}},
    {"tsh_init_ones", call_tsh_init_ones, 2, {{TENSOR, 0, "t"}, {STRUCT, STRUCT_tsh_init, "desc"}}},
    {"tsh_init_kaiming_uniform", call_tsh_init_kaiming_uniform, 2, {{TENSOR, 0, "t"}, {STRUCT,
        STRUCT_tsh_init, "desc"}}},
    {"tsh_init_kaiming_normal", call_tsh_init_kaiming_normal, 2, {{TENSOR, 0, "t"}, {STRUCT,
        STRUCT_tsh_init, "desc"}}},
    {"tsh_init_xavier_uniform", call_tsh_init_xavier_uniform, 2, {{TENSOR, 0, "t"}, {STRUCT,
        STRUCT_tsh_init, "desc"}}},
    {"tsh_init_xavier_normal", call_tsh_init_xavier_normal, 2, {{TENSOR, 0, "t"}, {STRUCT,
        STRUCT_tsh_init, "desc"}}},
    {"tsh_init_orthogonal", call_tsh_init_orthogonal, 2, {{TENSOR, 0, "t"}, {STRUCT,
        STRUCT_tsh_init, "desc"}}},
    {"tsh_init_dirac", call_tsh_init_dirac, 2, {{TENSOR, 0, "t"}, {STRUCT, STRUCT_tsh_init,
        "desc"}}},
    {"tsh_no_grad_begin", call_tsh_no_grad_begin, 1, {{CTX, 0, "ctx"}}},
    {"tsh_no_grad_end", call_tsh_no_grad_end, 1, {{CTX, 0, "ctx"}}},
    {"tsh_requires_grad", call_tsh_requires_grad, 2, {{TENSOR, 0, "t"}, {INT, 0, "on"}}},
    {"tsh_average_grad", call_tsh_average_grad, 2, {{TENSOR, 0, "t"}, {INT, 0, "on"}}},
    {"tsh_retain_grad", call_tsh_retain_grad, 1, {{TENSOR, 0, "t"}}},
    {"tsh_backward", call_tsh_backward, 2, {{CTX, 0, "ctx"}, {TENSOR, 0, "loss"}}},
    {"tsh_backward_with", call_tsh_backward_with, 3, {{CTX, 0, "ctx"}, {TENSOR, 0, "loss"},
        {STRUCT, STRUCT_tsh_backward_desc, "desc"}}},
    {"tsh_sync_grads", call_tsh_sync_grads, 1, {{CTX, 0, "ctx"}}},
    {"tsh_grad", call_tsh_grad, 1, {{TENSOR, 0, "t"}}},
    {"tsh_zero_grad", call_tsh_zero_grad, 1, {{TENSOR, 0, "t"}}},
    {"tsh_tape_dump", call_tsh_tape_dump, 2, {{CTX, 0, "ctx"}, {STREAM, 0, "file"}}},
    {"tsh_tape_dot", call_tsh_tape_dot, 2, {{CTX, 0, "ctx"}, {STREAM, 0, "file"}}},
    {"tsh_detect_anomaly", call_tsh_detect_anomaly, 2, {{CTX, 0, "ctx"}, {INT, 0, "on"}}},
    {"tsh_step_end", call_tsh_step_end, 1, {{CTX, 0, "ctx"}}},
    {"tsh_scope_begin", call_tsh_scope_begin, 1, {{CTX, 0, "ctx"}}},
    {"tsh_scope_end", call_tsh_scope_end, 1, {{CTX, 0, "ctx"}}},
    {"tsh_from", call_tsh_from, 4, {{CTX, 0, "ctx"}, {BUFFER, 0, "data"}, {SHAPE, 0, "shape"},
        {DTYPE, 0, "dtype"}}},
    {"tsh_sampler_next", call_tsh_sampler_next, 2, {{CTX, 0, "ctx"}, {STRUCT, STRUCT_tsh_sampler,
        "sampler"}}},
    {"tsh_sampler_index", call_tsh_sampler_index, 3, {{CTX, 0, "ctx"}, {STRUCT,
        STRUCT_tsh_sampler, "sampler"}, {LONG, 0, "i"}}},
    {"tsh_check_inputs", call_tsh_check_inputs, 2, {{CTX, 0, "ctx"}, {INT, 0, "on"}}},
    {"tsh_add", call_tsh_add, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_sub", call_tsh_sub, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_mul", call_tsh_mul, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_div", call_tsh_div, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_pow", call_tsh_pow, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_neg", call_tsh_neg, 1, {{TENSOR, 0, "x"}}},
    {"tsh_scale", call_tsh_scale, 2, {{TENSOR, 0, "x"}, {DOUBLE, 0, "factor"}}},
    {"tsh_add_scalar", call_tsh_add_scalar, 2, {{TENSOR, 0, "x"}, {DOUBLE, 0, "term"}}},
    {"tsh_pow_scalar", call_tsh_pow_scalar, 2, {{TENSOR, 0, "x"}, {DOUBLE, 0, "exponent"}}},
    {"tsh_maximum", call_tsh_maximum, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_minimum", call_tsh_minimum, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_clamp", call_tsh_clamp, 3, {{TENSOR, 0, "x"}, {DOUBLE, 0, "min"}, {DOUBLE, 0, "max"}}},
    {"tsh_exp", call_tsh_exp, 1, {{TENSOR, 0, "x"}}},
    {"tsh_expm1", call_tsh_expm1, 1, {{TENSOR, 0, "x"}}},
    {"tsh_log", call_tsh_log, 1, {{TENSOR, 0, "x"}}},
    {"tsh_log1p", call_tsh_log1p, 1, {{TENSOR, 0, "x"}}},
    {"tsh_sqrt", call_tsh_sqrt, 1, {{TENSOR, 0, "x"}}},
    {"tsh_rsqrt", call_tsh_rsqrt, 1, {{TENSOR, 0, "x"}}},
    {"tsh_reciprocal", call_tsh_reciprocal, 1, {{TENSOR, 0, "x"}}},
    {"tsh_sin", call_tsh_sin, 1, {{TENSOR, 0, "x"}}},
    {"tsh_cos", call_tsh_cos, 1, {{TENSOR, 0, "x"}}},
    {"tsh_abs", call_tsh_abs, 1, {{TENSOR, 0, "x"}}},
    {"tsh_sign", call_tsh_sign, 1, {{TENSOR, 0, "x"}}},
    {"tsh_floor", call_tsh_floor, 1, {{TENSOR, 0, "x"}}},
    {"tsh_ceil", call_tsh_ceil, 1, {{TENSOR, 0, "x"}}},
    {"tsh_round", call_tsh_round, 1, {{TENSOR, 0, "x"}}},
    {"tsh_erf", call_tsh_erf, 1, {{TENSOR, 0, "x"}}},
    {"tsh_sigmoid", call_tsh_sigmoid, 1, {{TENSOR, 0, "x"}}},
    {"tsh_tanh", call_tsh_tanh, 1, {{TENSOR, 0, "x"}}},
    {"tsh_relu", call_tsh_relu, 1, {{TENSOR, 0, "x"}}},
    {"tsh_relu6", call_tsh_relu6, 1, {{TENSOR, 0, "x"}}},
    {"tsh_gelu", call_tsh_gelu, 1, {{TENSOR, 0, "x"}}},
    {"tsh_gelu_tanh", call_tsh_gelu_tanh, 1, {{TENSOR, 0, "x"}}},
    {"tsh_silu", call_tsh_silu, 1, {{TENSOR, 0, "x"}}},
    {"tsh_mish", call_tsh_mish, 1, {{TENSOR, 0, "x"}}},
    {"tsh_selu", call_tsh_selu, 1, {{TENSOR, 0, "x"}}},
    {"tsh_hardsigmoid", call_tsh_hardsigmoid, 1, {{TENSOR, 0, "x"}}},
    {"tsh_hardswish", call_tsh_hardswish, 1, {{TENSOR, 0, "x"}}},
    {"tsh_log_sigmoid", call_tsh_log_sigmoid, 1, {{TENSOR, 0, "x"}}},
    {"tsh_softplus", call_tsh_softplus, 2, {{TENSOR, 0, "x"}, {DOUBLE, 0, "beta"}}},
    {"tsh_elu", call_tsh_elu, 2, {{TENSOR, 0, "x"}, {DOUBLE, 0, "alpha"}}},
    {"tsh_leaky_relu", call_tsh_leaky_relu, 2, {{TENSOR, 0, "x"}, {DOUBLE, 0, "slope"}}},
    {"tsh_eq", call_tsh_eq, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_ne", call_tsh_ne, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_lt", call_tsh_lt, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_le", call_tsh_le, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_gt", call_tsh_gt, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_ge", call_tsh_ge, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_where", call_tsh_where, 3, {{TENSOR, 0, "cond"}, {TENSOR, 0, "yes"}, {TENSOR, 0, "no"}}},
    {"tsh_masked_fill", call_tsh_masked_fill, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "mask"}, {DOUBLE,
        0, "value"}}},
    {"tsh_cast", call_tsh_cast, 2, {{TENSOR, 0, "x"}, {DTYPE, 0, "dtype"}}},
    {"tsh_dropout", call_tsh_dropout, 3, {{TENSOR, 0, "x"}, {DOUBLE, 0, "p"}, {MODULE, 0,
        "owner"}}},
    {"tsh_clone", call_tsh_clone, 1, {{TENSOR, 0, "x"}}},
    {"tsh_detach", call_tsh_detach, 1, {{TENSOR, 0, "x"}}},
    {"tsh_keep", call_tsh_keep, 1, {{TENSOR, 0, "t"}}},
    {"tsh_sum", call_tsh_sum, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0, "keepdim"}}},
    {"tsh_mean", call_tsh_mean, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0, "keepdim"}}},
    {"tsh_max", call_tsh_max, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0, "keepdim"}}},
    {"tsh_min", call_tsh_min, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0, "keepdim"}}},
    {"tsh_argmax", call_tsh_argmax, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0, "keepdim"}}},
    {"tsh_argmin", call_tsh_argmin, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0, "keepdim"}}},
    {"tsh_logsumexp", call_tsh_logsumexp, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0,
        "keepdim"}}},
    {"tsh_var", call_tsh_var, 4, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {DOUBLE, 0, "correction"},
        {INT, 0, "keepdim"}}},
    {"tsh_std", call_tsh_std, 4, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {DOUBLE, 0, "correction"},
        {INT, 0, "keepdim"}}},
    {"tsh_norm", call_tsh_norm, 4, {{TENSOR, 0, "x"}, {DOUBLE, 0, "p"}, {INT, 0, "dim"}, {INT, 0,
        "keepdim"}}},
    {"tsh_prod", call_tsh_prod, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0, "keepdim"}}},
    {"tsh_cumsum", call_tsh_cumsum, 2, {{TENSOR, 0, "x"}, {INT, 0, "dim"}}},
    {"tsh_softmax", call_tsh_softmax, 2, {{TENSOR, 0, "x"}, {INT, 0, "dim"}}},
    {"tsh_log_softmax", call_tsh_log_softmax, 2, {{TENSOR, 0, "x"}, {INT, 0, "dim"}}},
    {"tsh_reshape", call_tsh_reshape, 2, {{TENSOR, 0, "x"}, {SHAPE, 0, "shape"}}},
    {"tsh_transpose", call_tsh_transpose, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim0"}, {INT, 0,
        "dim1"}}},
    {"tsh_permute", call_tsh_permute, 2, {{TENSOR, 0, "x"}, {INTS, 0, "dims"}}},
    {"tsh_slice", call_tsh_slice, 4, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {LONG, 0, "start"},
        {LONG, 0, "length"}}},
    {"tsh_split", call_tsh_split, 4, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {COUNT, 0, "n"},
        {TENSORS, 0, "parts"}}},
    {"tsh_concat", call_tsh_concat, 3, {{TENSORS, 0, "parts"}, {COUNT, 0, "n"}, {INT, 0, "dim"}}},
    {"tsh_redistribute", call_tsh_redistribute, 2, {{TENSOR, 0, "x"}, {LAYOUT, 0, "layout"}}},
    {"tsh_full_tensor", call_tsh_full_tensor, 1, {{TENSOR, 0, "x"}}},
    {"tsh_set_layout", call_tsh_set_layout, 2, {{TENSOR, 0, "t"}, {LAYOUT, 0, "layout"}}},
    {"tsh_tp_copy", call_tsh_tp_copy, 2, {{TENSOR, 0, "x"}, {ENUM, 0, "op"}}},
    {"tsh_tp_reduce", call_tsh_tp_reduce, 2, {{TENSOR, 0, "x"}, {ENUM, 0, "op"}}},
    {"tsh_tp_scatter", call_tsh_tp_scatter, 2, {{TENSOR, 0, "x"}, {INT, 0, "dim"}}},
    {"tsh_tp_gather", call_tsh_tp_gather, 2, {{TENSOR, 0, "x"}, {INT, 0, "dim"}}},
    {"tsh_broadcast_batch", call_tsh_broadcast_batch, 1, {{TENSOR, 0, "t"}}},
    {"tsh_read", call_tsh_read, 5, {{CTX, 0, "ctx"}, {TENSOR, 0, "t"}, {ENUM, 0, "extent"},
        {OUTPUT, 0, "out"}, {SIZE, 0, "bytes"}}},
    {"tsh_write", call_tsh_write, 5, {{CTX, 0, "ctx"}, {TENSOR, 0, "t"}, {ENUM, 0, "extent"},
        {BUFFER, 0, "in"}, {SIZE, 0, "bytes"}}},
    {"tsh_to_string", call_tsh_to_string, 3, {{TENSOR, 0, "t"}, {TEXT, 0, "text"}, {SIZE, 0,
        "size"}}},
    {"tsh_matmul", call_tsh_matmul, 2, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_linear", call_tsh_linear, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "weight"}, {TENSOR, 0,
        "bias"}}},
    {"tsh_embedding", call_tsh_embedding, 3, {{TENSOR, 0, "ids"}, {TENSOR, 0, "weight"}, {STRUCT,
        STRUCT_tsh_lookup_desc, "desc"}}},
    {"tsh_layer_norm", call_tsh_layer_norm, 4, {{TENSOR, 0, "x"}, {TENSOR, 0, "weight"}, {TENSOR,
        0, "bias"}, {DOUBLE, 0, "eps"}}},
    {"tsh_rms_norm", call_tsh_rms_norm, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "weight"}, {DOUBLE, 0,
        "eps"}}},
    {"tsh_rms_norm_with", call_tsh_rms_norm_with, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "weight"},
        {STRUCT, STRUCT_tsh_rms_norm_desc, "desc"}}},
    {"tsh_rope", call_tsh_rope, 2, {{TENSOR, 0, "x"}, {STRUCT, STRUCT_tsh_rope_desc, "desc"}}},
    {"tsh_attention", call_tsh_attention, 4, {{TENSOR, 0, "q"}, {TENSOR, 0, "k"}, {TENSOR, 0,
        "v"}, {STRUCT, STRUCT_tsh_attention_desc, "desc"}}},
    {"tsh_cross_entropy", call_tsh_cross_entropy, 3, {{TENSOR, 0, "logits"}, {TENSOR, 0,
        "target"}, {STRUCT, STRUCT_tsh_cross_entropy_desc, "desc"}}},
    {"tsh_loss_in_chunks", call_tsh_loss_in_chunks, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "target"},
        {STRUCT, STRUCT_tsh_chunks_desc, "desc"}}},
    {"tsh_sample", call_tsh_sample, 2, {{TENSOR, 0, "logits"}, {STRUCT, STRUCT_tsh_sample_desc,
        "desc"}}},
    {"tsh_custom_op", call_tsh_custom_op, 5, {{CTX, 0, "ctx"}, {TENSORS, 0, "in"}, {COUNT, 0,
        "n"}, {TENSORS, 0, "out"}, {STRUCT, STRUCT_tsh_custom_op_desc, "desc"}}},
    {"tsh_mse_loss", call_tsh_mse_loss, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "target"}, {STRUCT,
        STRUCT_tsh_loss_desc, "desc"}}},
    {"tsh_l1_loss", call_tsh_l1_loss, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "target"}, {STRUCT,
        STRUCT_tsh_loss_desc, "desc"}}},
    {"tsh_huber_loss", call_tsh_huber_loss, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "target"}, {STRUCT,
        STRUCT_tsh_loss_desc, "desc"}}},
    {"tsh_smooth_l1_loss", call_tsh_smooth_l1_loss, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "target"},
        {STRUCT, STRUCT_tsh_loss_desc, "desc"}}},
    {"tsh_binary_cross_entropy", call_tsh_binary_cross_entropy, 3, {{TENSOR, 0, "x"}, {TENSOR, 0,
        "target"}, {STRUCT, STRUCT_tsh_loss_desc, "desc"}}},
    {"tsh_binary_cross_entropy_with_logits", call_tsh_binary_cross_entropy_with_logits, 3,
        {{TENSOR, 0, "x"}, {TENSOR, 0, "target"}, {STRUCT, STRUCT_tsh_loss_desc, "desc"}}},
    {"tsh_kl_div", call_tsh_kl_div, 3, {{TENSOR, 0, "x"}, {TENSOR, 0, "target"}, {STRUCT,
        STRUCT_tsh_loss_desc, "desc"}}},
    {"tsh_nll_loss", call_tsh_nll_loss, 3, {{TENSOR, 0, "log_probs"}, {TENSOR, 0, "target"},
        {STRUCT, STRUCT_tsh_loss_desc, "desc"}}},
    {"tsh_cosine_similarity", call_tsh_cosine_similarity, 4, {{TENSOR, 0, "a"}, {TENSOR, 0, "b"},
        {INT, 0, "dim"}, {DOUBLE, 0, "eps"}}},
    {"tsh_stack", call_tsh_stack, 3, {{TENSORS, 0, "parts"}, {COUNT, 0, "n"}, {INT, 0, "dim"}}},
    {"tsh_squeeze", call_tsh_squeeze, 2, {{TENSOR, 0, "x"}, {INT, 0, "dim"}}},
    {"tsh_unsqueeze", call_tsh_unsqueeze, 2, {{TENSOR, 0, "x"}, {INT, 0, "dim"}}},
    {"tsh_expand", call_tsh_expand, 2, {{TENSOR, 0, "x"}, {SHAPE, 0, "shape"}}},
    {"tsh_tile", call_tsh_tile, 3, {{TENSOR, 0, "x"}, {LONGS, 0, "repeats"}, {COUNT, 0, "n"}}},
    {"tsh_repeat_interleave", call_tsh_repeat_interleave, 3, {{TENSOR, 0, "x"}, {LONG, 0,
        "repeats"}, {INT, 0, "dim"}}},
    {"tsh_pad", call_tsh_pad, 5, {{TENSOR, 0, "x"}, {LONGS, 0, "pad"}, {COUNT, 0, "n"}, {ENUM, 0,
        "mode"}, {DOUBLE, 0, "value"}}},
    {"tsh_flip", call_tsh_flip, 2, {{TENSOR, 0, "x"}, {INT, 0, "dim"}}},
    {"tsh_roll", call_tsh_roll, 3, {{TENSOR, 0, "x"}, {LONG, 0, "shift"}, {INT, 0, "dim"}}},
    {"tsh_slice_step", call_tsh_slice_step, 5, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {LONG, 0,
        "start"}, {LONG, 0, "stop"}, {LONG, 0, "step"}}},
    {"tsh_tril", call_tsh_tril, 2, {{TENSOR, 0, "x"}, {LONG, 0, "diagonal"}}},
    {"tsh_triu", call_tsh_triu, 2, {{TENSOR, 0, "x"}, {LONG, 0, "diagonal"}}},
    {"tsh_one_hot", call_tsh_one_hot, 2, {{TENSOR, 0, "ids"}, {LONG, 0, "classes"}}},
    {"tsh_gather", call_tsh_gather, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {TENSOR, 0, "index"}}},
    {"tsh_scatter_add", call_tsh_scatter_add, 4, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {TENSOR, 0,
        "index"}, {TENSOR, 0, "src"}}},
    {"tsh_index_select", call_tsh_index_select, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {TENSOR, 0,
        "index"}}},
    {"tsh_topk", call_tsh_topk, 5, {{TENSOR, 0, "x"}, {LONG, 0, "k"}, {INT, 0, "dim"}, {INT, 0,
        "largest"}, {TENSORS, 0, "indices"}}},
    {"tsh_sort", call_tsh_sort, 4, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0, "descending"},
        {TENSORS, 0, "indices"}}},
    {"tsh_argsort", call_tsh_argsort, 3, {{TENSOR, 0, "x"}, {INT, 0, "dim"}, {INT, 0,
        "descending"}}},
    {"tsh_einsum", call_tsh_einsum, 3, {{TEXT, 0, "equation"}, {TENSOR, 0, "a"}, {TENSOR, 0, "b"}}},
    {"tsh_root", call_tsh_root, 1, {{CTX, 0, "ctx"}}},
    {"tsh_add_module", call_tsh_add_module, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"}, {STRUCT,
        STRUCT_tsh_module_desc, "desc"}}},
    {"tsh_find", call_tsh_find, 2, {{MODULE, 0, "module"}, {TEXT, 0, "path"}}},
    {"tsh_param", call_tsh_param, 2, {{MODULE, 0, "module"}, {TEXT, 0, "path"}}},
    {"tsh_each_param", call_tsh_each_param, 3, {{MODULE, 0, "module"}, {FUNCTION, 4, "fn"}, {USER,
        0, "user"}}},
    {"tsh_module_ctx", call_tsh_module_ctx, 1, {{MODULE, 0, "module"}}},
    {"tsh_module_path", call_tsh_module_path, 1, {{MODULE, 0, "module"}}},
    {"tsh_child", call_tsh_child, 2, {{MODULE, 0, "module"}, {INT, 0, "index"}}},
    {"tsh_tie", call_tsh_tie, 3, {{MODULE, 0, "module"}, {TEXT, 0, "name"}, {TENSOR, 0, "source"}}},
    {"tsh_materialize", call_tsh_materialize, 1, {{MODULE, 0, "module"}}},
    {"tsh_reset_parameters", call_tsh_reset_parameters, 1, {{MODULE, 0, "module"}}},
    {"tsh_to", call_tsh_to, 2, {{MODULE, 0, "module"}, {DTYPE, 0, "dtype"}}},
    {"tsh_train", call_tsh_train, 2, {{MODULE, 0, "module"}, {INT, 0, "on"}}},
    {"tsh_training", call_tsh_training, 1, {{MODULE, 0, "module"}}},
    {"tsh_checkpoint", call_tsh_checkpoint, 2, {{MODULE, 0, "module"}, {INT, 0, "on"}}},
    {"tsh_zero_grads", call_tsh_zero_grads, 1, {{MODULE, 0, "module"}}},
    {"tsh_rng_state", call_tsh_rng_state, 3, {{CTX, 0, "ctx"}, {BUFFER, 0, "state"}, {SIZE, 0,
        "size"}}},
    {"tsh_set_rng_state", call_tsh_set_rng_state, 3, {{CTX, 0, "ctx"}, {BUFFER, 0, "state"},
        {SIZE, 0, "size"}}},
    {"tsh_add_layer_norm", call_tsh_add_layer_norm, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"},
        {STRUCT, STRUCT_tsh_layer_norm_desc, "desc"}}},
    {"tsh_add_rms_norm", call_tsh_add_rms_norm, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"},
        {STRUCT, STRUCT_tsh_rms_norm_desc, "desc"}}},
    {"tsh_add_dropout", call_tsh_add_dropout, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"},
        {DOUBLE, 0, "p"}}},
    {"tsh_add_param", call_tsh_add_param, 4, {{MODULE, 0, "module"}, {TEXT, 0, "name"}, {SHAPE, 0,
        "shape"}, {STRUCT, STRUCT_tsh_param_desc, "desc"}}},
    {"tsh_forward_n", call_tsh_forward_n, 3, {{MODULE, 0, "module"}, {TENSORS, 0, "in"}, {COUNT,
        0, "n"}}},
    {"tsh_forward", call_tsh_forward, 2, {{MODULE, 0, "module"}, {TENSOR, 0, "x"}}},
    {"tsh_forward_residual", call_tsh_forward_residual, 3, {{MODULE, 0, "module"}, {TENSORS, 0,
        "x"}, {TENSOR, 0, "y"}}},
    {"tsh_parallelize", call_tsh_parallelize, 3, {{MODULE, 0, "module"}, {STRUCT,
        STRUCT_tsh_plan_rule, "rules"}, {COUNT, 0, "count"}}},
    {"tsh_plan_report", call_tsh_plan_report, 4, {{MODULE, 0, "module"}, {STRUCT,
        STRUCT_tsh_plan_rule, "rules"}, {COUNT, 0, "count"}, {STREAM, 0, "file"}}},
    {"tsh_summary", call_tsh_summary, 2, {{MODULE, 0, "module"}, {STREAM, 0, "file"}}},
    {"tsh_add_linear", call_tsh_add_linear, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"}, {STRUCT,
        STRUCT_tsh_linear_desc, "desc"}}},
    {"tsh_add_classifier", call_tsh_add_classifier, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"},
        {STRUCT, STRUCT_tsh_classifier_desc, "desc"}}},
    {"tsh_add_embedding", call_tsh_add_embedding, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"},
        {STRUCT, STRUCT_tsh_embedding_desc, "desc"}}},
    {"tsh_add_attention", call_tsh_add_attention, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"},
        {STRUCT, STRUCT_tsh_attention_layer_desc, "desc"}}},
    {"tsh_set_segments", call_tsh_set_segments, 2, {{MODULE, 0, "module"}, {TENSOR, 0,
        "segments"}}},
    {"tsh_add_mlp", call_tsh_add_mlp, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"}, {STRUCT,
        STRUCT_tsh_mlp_desc, "desc"}}},
    {"tsh_cache_new", call_tsh_cache_new, 4, {{MODULE, 0, "module"}, {LONG, 0, "batch"}, {LONG, 0,
        "length"}, {DTYPE, 0, "dtype"}}},
    {"tsh_cache_free", call_tsh_cache_free, 1, {{CACHE, 0, "cache"}}},
    {"tsh_cache_counts", call_tsh_cache_counts, 2, {{CACHE, 0, "cache"}, {LONGS, 0, "counts"}}},
    {"tsh_cache_length", call_tsh_cache_length, 1, {{CACHE, 0, "cache"}}},
    {"tsh_cache_truncate", call_tsh_cache_truncate, 2, {{CACHE, 0, "cache"}, {LONG, 0, "length"}}},
    {"tsh_set_argument", call_tsh_set_argument, 3, {{MODULE, 0, "module"}, {TEXT, 0, "name"},
        {LONG, 0, "value"}}},
    {"tsh_argument", call_tsh_argument, 2, {{MODULE, 0, "module"}, {TEXT, 0, "name"}}},
    {"tsh_local_argument", call_tsh_local_argument, 2, {{MODULE, 0, "module"}, {TEXT, 0, "name"}}},
    {"tsh_policy_find", call_tsh_policy_find, 1, {{TEXT, 0, "name"}}},
    {"tsh_parallelize_policy", call_tsh_parallelize_policy, 2, {{MODULE, 0, "root"}, {STRUCT,
        STRUCT_tsh_policy, "policy"}}},
    {"tsh_conv1d", call_tsh_conv1d, 4, {{TENSOR, 0, "x"}, {TENSOR, 0, "weight"}, {TENSOR, 0,
        "bias"}, {STRUCT, STRUCT_tsh_conv_options, "options"}}},
    {"tsh_conv2d", call_tsh_conv2d, 4, {{TENSOR, 0, "x"}, {TENSOR, 0, "weight"}, {TENSOR, 0,
        "bias"}, {STRUCT, STRUCT_tsh_conv_options, "options"}}},
    {"tsh_conv_transpose1d", call_tsh_conv_transpose1d, 4, {{TENSOR, 0, "x"}, {TENSOR, 0,
        "weight"}, {TENSOR, 0, "bias"}, {STRUCT, STRUCT_tsh_conv_options, "options"}}},
    {"tsh_conv_transpose2d", call_tsh_conv_transpose2d, 4, {{TENSOR, 0, "x"}, {TENSOR, 0,
        "weight"}, {TENSOR, 0, "bias"}, {STRUCT, STRUCT_tsh_conv_options, "options"}}},
    {"tsh_max_pool1d", call_tsh_max_pool1d, 2, {{TENSOR, 0, "x"}, {STRUCT,
        STRUCT_tsh_pool_options, "options"}}},
    {"tsh_max_pool2d", call_tsh_max_pool2d, 2, {{TENSOR, 0, "x"}, {STRUCT,
        STRUCT_tsh_pool_options, "options"}}},
    {"tsh_avg_pool1d", call_tsh_avg_pool1d, 2, {{TENSOR, 0, "x"}, {STRUCT,
        STRUCT_tsh_pool_options, "options"}}},
    {"tsh_avg_pool2d", call_tsh_avg_pool2d, 2, {{TENSOR, 0, "x"}, {STRUCT,
        STRUCT_tsh_pool_options, "options"}}},
    {"tsh_adaptive_avg_pool1d", call_tsh_adaptive_avg_pool1d, 2, {{TENSOR, 0, "x"}, {LONG, 0,
        "length"}}},
    {"tsh_adaptive_avg_pool2d", call_tsh_adaptive_avg_pool2d, 3, {{TENSOR, 0, "x"}, {LONG, 0,
        "height"}, {LONG, 0, "width"}}},
    {"tsh_interpolate", call_tsh_interpolate, 2, {{TENSOR, 0, "x"}, {STRUCT,
        STRUCT_tsh_interpolate_options, "options"}}},
    {"tsh_pixel_shuffle", call_tsh_pixel_shuffle, 2, {{TENSOR, 0, "x"}, {LONG, 0, "factor"}}},
    {"tsh_add_conv1d", call_tsh_add_conv1d, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"}, {STRUCT,
        STRUCT_tsh_conv_desc, "desc"}}},
    {"tsh_add_conv2d", call_tsh_add_conv2d, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"}, {STRUCT,
        STRUCT_tsh_conv_desc, "desc"}}},
    {"tsh_add_conv_transpose1d", call_tsh_add_conv_transpose1d, 3, {{MODULE, 0, "parent"}, {TEXT,
        0, "name"}, {STRUCT, STRUCT_tsh_conv_desc, "desc"}}},
    {"tsh_add_conv_transpose2d", call_tsh_add_conv_transpose2d, 3, {{MODULE, 0, "parent"}, {TEXT,
        0, "name"}, {STRUCT, STRUCT_tsh_conv_desc, "desc"}}},
    {"tsh_batch_norm", call_tsh_batch_norm, 6, {{TENSOR, 0, "x"}, {TENSOR, 0, "weight"}, {TENSOR,
        0, "bias"}, {TENSOR, 0, "running_mean"}, {TENSOR, 0, "running_var"}, {STRUCT,
        STRUCT_tsh_batch_norm_options, "options"}}},
    {"tsh_add_batch_norm", call_tsh_add_batch_norm, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"},
        {STRUCT, STRUCT_tsh_batch_norm_desc, "desc"}}},
    {"tsh_group_norm", call_tsh_group_norm, 5, {{TENSOR, 0, "x"}, {LONG, 0, "groups"}, {TENSOR, 0,
        "weight"}, {TENSOR, 0, "bias"}, {DOUBLE, 0, "eps"}}},
    {"tsh_instance_norm", call_tsh_instance_norm, 4, {{TENSOR, 0, "x"}, {TENSOR, 0, "weight"},
        {TENSOR, 0, "bias"}, {DOUBLE, 0, "eps"}}},
    {"tsh_add_group_norm", call_tsh_add_group_norm, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"},
        {STRUCT, STRUCT_tsh_group_norm_desc, "desc"}}},
    {"tsh_add_instance_norm", call_tsh_add_instance_norm, 3, {{MODULE, 0, "parent"}, {TEXT, 0,
        "name"}, {STRUCT, STRUCT_tsh_instance_norm_desc, "desc"}}},
    {"tsh_lstm", call_tsh_lstm, 8, {{TENSOR, 0, "x"}, {TENSORS, 0, "weights"}, {COUNT, 0,
        "count"}, {TENSOR, 0, "h0"}, {TENSOR, 0, "c0"}, {STRUCT, STRUCT_tsh_recurrent_desc,
        "desc"}, {TENSORS, 0, "h"}, {TENSORS, 0, "c"}}},
    {"tsh_gru", call_tsh_gru, 6, {{TENSOR, 0, "x"}, {TENSORS, 0, "weights"}, {COUNT, 0, "count"},
        {TENSOR, 0, "h0"}, {STRUCT, STRUCT_tsh_recurrent_desc, "desc"}, {TENSORS, 0, "h"}}},
    {"tsh_add_lstm", call_tsh_add_lstm, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"}, {STRUCT,
        STRUCT_tsh_recurrent_desc, "desc"}}},
    {"tsh_add_gru", call_tsh_add_gru, 3, {{MODULE, 0, "parent"}, {TEXT, 0, "name"}, {STRUCT,
        STRUCT_tsh_recurrent_desc, "desc"}}},
    {"tsh_lstm_forward", call_tsh_lstm_forward, 6, {{MODULE, 0, "module"}, {TENSOR, 0, "x"},
        {TENSOR, 0, "h0"}, {TENSOR, 0, "c0"}, {TENSORS, 0, "h"}, {TENSORS, 0, "c"}}},
    {"tsh_gru_forward", call_tsh_gru_forward, 4, {{MODULE, 0, "module"}, {TENSOR, 0, "x"},
        {TENSOR, 0, "h0"}, {TENSORS, 0, "h"}}},
    {"tsh_schedule_lr", call_tsh_schedule_lr, 2, {{STRUCT, STRUCT_tsh_schedule, "schedule"},
        {LONG, 0, "step"}}},
    {"tsh_plateau_step", call_tsh_plateau_step, 2, {{STRUCT, STRUCT_tsh_plateau, "plateau"},
        {DOUBLE, 0, "metric"}}},
    {"tsh_optim_new", call_tsh_optim_new, 2, {{MODULE, 0, "module"}, {STRUCT,
        STRUCT_tsh_optim_desc, "desc"}}},
    {"tsh_optim_free", call_tsh_optim_free, 1, {{OPTIM, 0, "optim"}}},
    {"tsh_optim_group", call_tsh_optim_group, 4, {{OPTIM, 0, "optim"}, {TEXT, 0, "pattern"},
        {DOUBLE, 0, "lr_scale"}, {DOUBLE, 0, "weight_decay"}}},
    {"tsh_optim_group_with", call_tsh_optim_group_with, 3, {{OPTIM, 0, "optim"}, {TEXT, 0,
        "pattern"}, {STRUCT, STRUCT_tsh_optim_desc, "desc"}}},
    {"tsh_optim_set_lr", call_tsh_optim_set_lr, 2, {{OPTIM, 0, "optim"}, {DOUBLE, 0, "lr"}}},
    {"tsh_optim_step", call_tsh_optim_step, 1, {{OPTIM, 0, "optim"}}},
    {"tsh_optim_state", call_tsh_optim_state, 1, {{OPTIM, 0, "optim"}}},
    {"tsh_clip_grad_norm", call_tsh_clip_grad_norm, 3, {{MODULE, 0, "module"}, {DOUBLE, 0,
        "max_norm"}, {DOUBLES, 0, "norm"}}},
    {"tsh_freeze", call_tsh_freeze, 2, {{MODULE, 0, "module"}, {TEXT, 0, "pattern"}}},
    {"tsh_unfreeze", call_tsh_unfreeze, 2, {{MODULE, 0, "module"}, {TEXT, 0, "pattern"}}},
    {"tsh_lora", call_tsh_lora, 3, {{MODULE, 0, "module"}, {TEXT, 0, "pattern"}, {STRUCT,
        STRUCT_tsh_lora_desc, "desc"}}},
    {"tsh_lora_use", call_tsh_lora_use, 2, {{MODULE, 0, "module"}, {TEXT, 0, "name"}}},
    {"tsh_lora_merge", call_tsh_lora_merge, 1, {{MODULE, 0, "module"}}},
    {"tsh_lora_unmerge", call_tsh_lora_unmerge, 1, {{MODULE, 0, "module"}}},
    {"tsh_lora_free", call_tsh_lora_free, 2, {{MODULE, 0, "module"}, {TEXT, 0, "name"}}},
    {"tsh_ema_new", call_tsh_ema_new, 2, {{MODULE, 0, "module"}, {DOUBLE, 0, "decay"}}},
    {"tsh_ema_free", call_tsh_ema_free, 1, {{EMA, 0, "ema"}}},
    {"tsh_ema_update", call_tsh_ema_update, 1, {{EMA, 0, "ema"}}},
    {"tsh_ema_swap", call_tsh_ema_swap, 1, {{EMA, 0, "ema"}}},
    {"tsh_ema_updates", call_tsh_ema_updates, 1, {{EMA, 0, "ema"}}},
    {"tsh_outer_new", call_tsh_outer_new, 3, {{MODULE, 0, "module"}, {OPTIM, 0, "optim"}, {STRUCT,
        STRUCT_tsh_outer_desc, "desc"}}},
    {"tsh_outer_step", call_tsh_outer_step, 1, {{OUTER, 0, "outer"}}},
    {"tsh_outer_state", call_tsh_outer_state, 1, {{OUTER, 0, "outer"}}},
    {"tsh_outer_free", call_tsh_outer_free, 1, {{OUTER, 0, "outer"}}},
    {"tsh_quantize", call_tsh_quantize, 3, {{MODULE, 0, "module"}, {TEXT, 0, "pattern"}, {DTYPE,
        0, "dtype"}}},
    {"tsh_pipeline_new", call_tsh_pipeline_new, 2, {{MODULE, 0, "container"}, {STRUCT,
        STRUCT_tsh_pipeline_desc, "desc"}}},
    {"tsh_pipeline_train", call_tsh_pipeline_train, 2, {{PIPELINE, 0, "pipeline"}, {DOUBLES, 0,
        "loss"}}},
    {"tsh_pipeline_evaluate", call_tsh_pipeline_evaluate, 3, {{PIPELINE, 0, "pipeline"}, {COUNT,
        0, "micro_batches"}, {DOUBLES, 0, "loss"}}},
    {"tsh_save", call_tsh_save, 3, {{MODULE, 0, "module"}, {TEXT, 0, "path"}, {OPTIM, 0, "optim"}}},
    {"tsh_save_with", call_tsh_save_with, 4, {{MODULE, 0, "module"}, {TEXT, 0, "path"}, {OPTIM, 0,
        "optim"}, {STRUCT, STRUCT_tsh_file_desc, "desc"}}},
    {"tsh_load", call_tsh_load, 3, {{MODULE, 0, "module"}, {TEXT, 0, "path"}, {OPTIM, 0, "optim"}}},
    {"tsh_load_with", call_tsh_load_with, 4, {{MODULE, 0, "module"}, {TEXT, 0, "path"}, {OPTIM, 0,
        "optim"}, {STRUCT, STRUCT_tsh_file_desc, "desc"}}},
    {"tsh_file_open", call_tsh_file_open, 3, {{TEXT, 0, "path"}, {LONG, 0, "max"}, {ERROR_AT, 0,
        "error"}}},
    {"tsh_writer_open", call_tsh_writer_open, 3, {{WRITER, 0, "writer"}, {TEXT, 0, "path"}, {INT,
        0, "rows"}}},
    {"tsh_writer_add", call_tsh_writer_add, 3, {{WRITER, 0, "writer"}, {BUFFER, 0, "data"}, {SIZE,
        0, "bytes"}}},
    {"tsh_writer_sync", call_tsh_writer_sync, 1, {{WRITER, 0, "writer"}}},
    {"tsh_writer_close", call_tsh_writer_close, 2, {{WRITER, 0, "writer"}, {INT, 0, "keep"}}},
    {"tsh_gradcheck", call_tsh_gradcheck, 7, {{CTX, 0, "ctx"}, {FUNCTION, 5, "fn"}, {TENSORS, 0,
        "in"}, {COUNT, 0, "n"}, {USER, 0, "user"}, {DOUBLE, 0, "eps"}, {LONG, 0, "samples"}}},
    {"tsh_check_replicas", call_tsh_check_replicas, 1, {{MODULE, 0, "module"}}},
    {"tsh_hash", call_tsh_hash, 2, {{CTX, 0, "ctx"}, {TENSOR, 0, "t"}}},
    {"tsh_trace_begin", call_tsh_trace_begin, 2, {{CTX, 0, "ctx"}, {STRUCT, STRUCT_tsh_trace_desc,
        "desc"}}},
    {"tsh_trace_end", call_tsh_trace_end, 1, {{CTX, 0, "ctx"}}},
    {"tsh_profile", call_tsh_profile, 2, {{CTX, 0, "ctx"}, {INT, 0, "on"}}},
};
