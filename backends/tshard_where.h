/* tshard_where.h - errors say where the program called the library */
/*
 * DO THIS
 *
 *     #include "tshard.h"
 *     #include "backends/tshard_where.h"      // after tshard.h and backends, in each source file
 *
 * and compile with -DTSHARD_WHERE while you look for an error. Then its sentence ends with the file
 * and line of the call that failed:
 *
 *     tsh_add: shapes (2, 3) R and (4) R do not broadcast (...): tsh_reshape (model.c:42)
 *
 * Without TSHARD_WHERE this header holds nothing, and costs nothing.
 *
 * DOES
 *
 * - name the innermost call: in tsh_add(tsh_mul(a, b), c) over two lines that of tsh_mul, if that
 *   fails; in a module's forward the call there, not tsh_forward;
 * - work in C99 and C++11. Each function of tshard.h that has a ctx, a tensor or a module gets a
 *   macro of its name, which evaluates each argument once. A function's address, as in
 *   `op = tsh_gelu;`, is that of the function itself: calls through it name no place of their own.
 *
 * DOES NOT
 *
 * - name a place for tsh_optim_..., tsh_pipeline_... and tsh_cache_...: in these, errors name the
 *   place of the call around them, or none;
 * - go before the implementation: define TSHARD_IMPLEMENTATION for an #include further up.
 *
 * Made from tshard.h by `python3 tests/lint/where.py --write`; `make lint` checks that it is up to
 * date.
 */
#if defined(TSHARD_WHERE) && !defined(TSHARD_WHERE_H)
#define TSHARD_WHERE_H

#if !defined(TSHARD_H)
#error "include tshard.h before tshard_where.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Defines name_placed, which calls name with the place set in `owner`, a ctx, and returns what name
 * returns. TSHI_WHERE_VOID: of functions that return nothing. TSHI_HERE: the first parameters. */
#define TSHI_HERE const char *file_, int line_
#define TSHI_WHERE(type, name, owner, parameters, arguments)                                      \
    static inline type name##_placed parameters {                                                 \
        tsh_ctx *const ctx_ = owner;                                                              \
        const tsh_place outer_ = tsh_set_place(ctx_, file_, line_);                               \
        type result_ = name arguments;                                                            \
        (void)tsh_set_place(ctx_, outer_.file, outer_.line);                                      \
        return result_;                                                                           \
    }
#define TSHI_WHERE_VOID(name, owner, parameters, arguments)                                       \
    static inline void name##_placed parameters {                                                 \
        tsh_ctx *const ctx_ = owner;                                                              \
        const tsh_place outer_ = tsh_set_place(ctx_, file_, line_);                               \
        name arguments;                                                                           \
        (void)tsh_set_place(ctx_, outer_.file, outer_.line);                                      \
    }

TSHI_WHERE(int64_t, tsh_tp_shard_range, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_layout layout, int64_t
          length, int rank, tsh_range ranges[TSH_MAX_SEGMENTS]), (ctx, layout, length, rank,
          ranges))
#define tsh_tp_shard_range(...) tsh_tp_shard_range_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_dry_run, ctx, (TSHI_HERE, tsh_ctx *ctx, int on), (ctx, on))
#define tsh_dry_run(...) tsh_dry_run_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_tensor_new, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_dtype dtype, tsh_shape
          shape, tsh_layout layout), (ctx, dtype, shape, layout))
#define tsh_tensor_new(...) tsh_tensor_new_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_tensor_from, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_dtype dtype, tsh_shape
          shape, tsh_layout layout, const void *data), (ctx, dtype, shape, layout, data))
#define tsh_tensor_from(...) tsh_tensor_from_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_tensor_free, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t), (t))
#define tsh_tensor_free(...) tsh_tensor_free_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_zeros, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_shape shape), (ctx, shape))
#define tsh_zeros(...) tsh_zeros_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_ones, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_shape shape), (ctx, shape))
#define tsh_ones(...) tsh_ones_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_full, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_shape shape, double value),
          (ctx, shape, value))
#define tsh_full(...) tsh_full_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_arange, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_dtype dtype, double start,
          double stop, double step), (ctx, dtype, start, stop, step))
#define tsh_arange(...) tsh_arange_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_randn, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_shape shape), (ctx, shape))
#define tsh_randn(...) tsh_randn_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_uniform, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_shape shape, double low,
          double high), (ctx, shape, low, high))
#define tsh_uniform(...) tsh_uniform_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(void *, tsh_data, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_tensor *t), (ctx, t))
#define tsh_data(...) tsh_data_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(double, tsh_item, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_tensor *t), (ctx, t))
#define tsh_item(...) tsh_item_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_uniform, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const tsh_init
          *desc), (t, desc))
#define tsh_init_uniform(...) tsh_init_uniform_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_normal, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const tsh_init
          *desc), (t, desc))
#define tsh_init_normal(...) tsh_init_normal_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_trunc_normal, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const
          tsh_init *desc), (t, desc))
#define tsh_init_trunc_normal(...) tsh_init_trunc_normal_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_constant, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const tsh_init
          *desc), (t, desc))
#define tsh_init_constant(...) tsh_init_constant_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_zeros, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const tsh_init
          *desc), (t, desc))
#define tsh_init_zeros(...) tsh_init_zeros_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_ones, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const tsh_init
          *desc), (t, desc))
#define tsh_init_ones(...) tsh_init_ones_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_kaiming_uniform, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const
          tsh_init *desc), (t, desc))
#define tsh_init_kaiming_uniform(...) \
    tsh_init_kaiming_uniform_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_kaiming_normal, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const
          tsh_init *desc), (t, desc))
#define tsh_init_kaiming_normal(...) tsh_init_kaiming_normal_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_xavier_uniform, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const
          tsh_init *desc), (t, desc))
#define tsh_init_xavier_uniform(...) tsh_init_xavier_uniform_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_xavier_normal, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const
          tsh_init *desc), (t, desc))
#define tsh_init_xavier_normal(...) tsh_init_xavier_normal_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_orthogonal, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const tsh_init
          *desc), (t, desc))
#define tsh_init_orthogonal(...) tsh_init_orthogonal_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_init_dirac, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, const tsh_init
          *desc), (t, desc))
#define tsh_init_dirac(...) tsh_init_dirac_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_no_grad_begin, ctx, (TSHI_HERE, tsh_ctx *ctx), (ctx))
#define tsh_no_grad_begin(...) tsh_no_grad_begin_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_no_grad_end, ctx, (TSHI_HERE, tsh_ctx *ctx), (ctx))
#define tsh_no_grad_end(...) tsh_no_grad_end_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_requires_grad, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, int on), (t,
          on))
#define tsh_requires_grad(...) tsh_requires_grad_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_average_grad, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, int on), (t,
          on))
#define tsh_average_grad(...) tsh_average_grad_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_retain_grad, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t), (t))
#define tsh_retain_grad(...) tsh_retain_grad_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_backward, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_tensor *loss), (ctx, loss))
#define tsh_backward(...) tsh_backward_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_backward_with, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_tensor *loss, const
          tsh_backward_desc *desc), (ctx, loss, desc))
#define tsh_backward_with(...) tsh_backward_with_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_sync_grads, ctx, (TSHI_HERE, tsh_ctx *ctx), (ctx))
#define tsh_sync_grads(...) tsh_sync_grads_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_grad, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t), (t))
#define tsh_grad(...) tsh_grad_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_zero_grad, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t), (t))
#define tsh_zero_grad(...) tsh_zero_grad_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_tape_dump, ctx, (TSHI_HERE, tsh_ctx *ctx, FILE *file), (ctx, file))
#define tsh_tape_dump(...) tsh_tape_dump_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_tape_dot, ctx, (TSHI_HERE, tsh_ctx *ctx, FILE *file), (ctx, file))
#define tsh_tape_dot(...) tsh_tape_dot_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_detect_anomaly, ctx, (TSHI_HERE, tsh_ctx *ctx, int on), (ctx, on))
#define tsh_detect_anomaly(...) tsh_detect_anomaly_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_step_end, ctx, (TSHI_HERE, tsh_ctx *ctx), (ctx))
#define tsh_step_end(...) tsh_step_end_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_scope_begin, ctx, (TSHI_HERE, tsh_ctx *ctx), (ctx))
#define tsh_scope_begin(...) tsh_scope_begin_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_scope_end, ctx, (TSHI_HERE, tsh_ctx *ctx), (ctx))
#define tsh_scope_end(...) tsh_scope_end_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_from, ctx, (TSHI_HERE, tsh_ctx *ctx, const void *data, tsh_shape shape,
          tsh_dtype dtype), (ctx, data, shape, dtype))
#define tsh_from(...) tsh_from_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(int64_t, tsh_sampler_next, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_sampler *sampler), (ctx,
          sampler))
#define tsh_sampler_next(...) tsh_sampler_next_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(int64_t, tsh_sampler_index, ctx, (TSHI_HERE, tsh_ctx *ctx, const tsh_sampler *sampler,
          int64_t i), (ctx, sampler, i))
#define tsh_sampler_index(...) tsh_sampler_index_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_check_inputs, ctx, (TSHI_HERE, tsh_ctx *ctx, int on), (ctx, on))
#define tsh_check_inputs(...) tsh_check_inputs_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_add, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_add(...) tsh_add_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_sub, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_sub(...) tsh_sub_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_mul, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_mul(...) tsh_mul_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_div, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_div(...) tsh_div_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_pow, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_pow(...) tsh_pow_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_neg, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_neg(...) tsh_neg_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_scale, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, double factor), (x,
          factor))
#define tsh_scale(...) tsh_scale_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_add_scalar, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, double term), (x,
          term))
#define tsh_add_scalar(...) tsh_add_scalar_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_pow_scalar, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, double exponent),
          (x, exponent))
#define tsh_pow_scalar(...) tsh_pow_scalar_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_maximum, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor
          *b), (a, b))
#define tsh_maximum(...) tsh_maximum_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_minimum, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor
          *b), (a, b))
#define tsh_minimum(...) tsh_minimum_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_clamp, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, double min, double
          max), (x, min, max))
#define tsh_clamp(...) tsh_clamp_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_exp, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_exp(...) tsh_exp_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_expm1, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_expm1(...) tsh_expm1_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_log, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_log(...) tsh_log_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_log1p, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_log1p(...) tsh_log1p_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_sqrt, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_sqrt(...) tsh_sqrt_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_rsqrt, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_rsqrt(...) tsh_rsqrt_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_reciprocal, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_reciprocal(...) tsh_reciprocal_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_sin, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_sin(...) tsh_sin_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_cos, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_cos(...) tsh_cos_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_abs, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_abs(...) tsh_abs_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_sign, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_sign(...) tsh_sign_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_floor, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_floor(...) tsh_floor_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_ceil, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_ceil(...) tsh_ceil_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_round, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_round(...) tsh_round_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_erf, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_erf(...) tsh_erf_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_sigmoid, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_sigmoid(...) tsh_sigmoid_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_tanh, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_tanh(...) tsh_tanh_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_relu, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_relu(...) tsh_relu_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_relu6, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_relu6(...) tsh_relu6_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_gelu, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_gelu(...) tsh_gelu_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_gelu_tanh, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_gelu_tanh(...) tsh_gelu_tanh_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_silu, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_silu(...) tsh_silu_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_mish, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_mish(...) tsh_mish_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_selu, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_selu(...) tsh_selu_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_hardsigmoid, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_hardsigmoid(...) tsh_hardsigmoid_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_hardswish, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_hardswish(...) tsh_hardswish_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_log_sigmoid, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_log_sigmoid(...) tsh_log_sigmoid_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_softplus, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, double beta), (x,
          beta))
#define tsh_softplus(...) tsh_softplus_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_elu, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, double alpha), (x,
          alpha))
#define tsh_elu(...) tsh_elu_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_leaky_relu, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, double slope),
          (x, slope))
#define tsh_leaky_relu(...) tsh_leaky_relu_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_eq, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_eq(...) tsh_eq_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_ne, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_ne(...) tsh_ne_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_lt, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_lt(...) tsh_lt_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_le, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_le(...) tsh_le_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_gt, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_gt(...) tsh_gt_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_ge, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor *b),
          (a, b))
#define tsh_ge(...) tsh_ge_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_where, tsh_ctx_of(cond ? cond : yes ? yes : no), (TSHI_HERE, tsh_tensor
          *cond, tsh_tensor *yes, tsh_tensor *no), (cond, yes, no))
#define tsh_where(...) tsh_where_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_masked_fill, tsh_ctx_of(x ? x : mask), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *mask, double value), (x, mask, value))
#define tsh_masked_fill(...) tsh_masked_fill_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_cast, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, tsh_dtype dtype), (x,
          dtype))
#define tsh_cast(...) tsh_cast_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_dropout, tsh_module_ctx(owner), (TSHI_HERE, tsh_tensor *x, double p,
          tsh_module *owner), (x, p, owner))
#define tsh_dropout(...) tsh_dropout_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_clone, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_clone(...) tsh_clone_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_detach, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_detach(...) tsh_detach_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_keep, tsh_ctx_of(t), (TSHI_HERE, const tsh_tensor *t), (t))
#define tsh_keep(...) tsh_keep_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_sum, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int keepdim),
          (x, dim, keepdim))
#define tsh_sum(...) tsh_sum_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_mean, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int keepdim),
          (x, dim, keepdim))
#define tsh_mean(...) tsh_mean_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_max, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int keepdim),
          (x, dim, keepdim))
#define tsh_max(...) tsh_max_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_min, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int keepdim),
          (x, dim, keepdim))
#define tsh_min(...) tsh_min_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_argmax, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int
          keepdim), (x, dim, keepdim))
#define tsh_argmax(...) tsh_argmax_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_argmin, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int
          keepdim), (x, dim, keepdim))
#define tsh_argmin(...) tsh_argmin_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_logsumexp, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int
          keepdim), (x, dim, keepdim))
#define tsh_logsumexp(...) tsh_logsumexp_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_var, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, double
          correction, int keepdim), (x, dim, correction, keepdim))
#define tsh_var(...) tsh_var_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_std, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, double
          correction, int keepdim), (x, dim, correction, keepdim))
#define tsh_std(...) tsh_std_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_norm, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, double p, int dim, int
          keepdim), (x, p, dim, keepdim))
#define tsh_norm(...) tsh_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_prod, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int keepdim),
          (x, dim, keepdim))
#define tsh_prod(...) tsh_prod_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_cumsum, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim), (x, dim))
#define tsh_cumsum(...) tsh_cumsum_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_softmax, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim), (x, dim))
#define tsh_softmax(...) tsh_softmax_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_log_softmax, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim), (x,
          dim))
#define tsh_log_softmax(...) tsh_log_softmax_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_reshape, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, tsh_shape shape),
          (x, shape))
#define tsh_reshape(...) tsh_reshape_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_transpose, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim0, int
          dim1), (x, dim0, dim1))
#define tsh_transpose(...) tsh_transpose_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_permute, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, const int *dims),
          (x, dims))
#define tsh_permute(...) tsh_permute_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_slice, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int64_t
          start, int64_t length), (x, dim, start, length))
#define tsh_slice(...) tsh_slice_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_split, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int n,
          tsh_tensor **parts), (x, dim, n, parts))
#define tsh_split(...) tsh_split_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_concat, tsh_ctx_of(parts ? parts[0] : NULL), (TSHI_HERE, tsh_tensor
          *const *parts, int n, int dim), (parts, n, dim))
#define tsh_concat(...) tsh_concat_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_redistribute, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, tsh_layout
          layout), (x, layout))
#define tsh_redistribute(...) tsh_redistribute_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_full_tensor, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x), (x))
#define tsh_full_tensor(...) tsh_full_tensor_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_set_layout, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, tsh_layout
          layout), (t, layout))
#define tsh_set_layout(...) tsh_set_layout_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_tp_copy, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, tsh_redop op), (x,
          op))
#define tsh_tp_copy(...) tsh_tp_copy_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_tp_reduce, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, tsh_redop op), (x,
          op))
#define tsh_tp_reduce(...) tsh_tp_reduce_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_tp_scatter, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim), (x,
          dim))
#define tsh_tp_scatter(...) tsh_tp_scatter_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_tp_gather, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim), (x,
          dim))
#define tsh_tp_gather(...) tsh_tp_gather_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_broadcast_batch, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t), (t))
#define tsh_broadcast_batch(...) tsh_broadcast_batch_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_read, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent,
          void *out, size_t bytes), (ctx, t, extent, out, bytes))
#define tsh_read(...) tsh_read_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_write, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent,
          const void *in, size_t bytes), (ctx, t, extent, in, bytes))
#define tsh_write(...) tsh_write_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(char *, tsh_to_string, tsh_ctx_of(t), (TSHI_HERE, tsh_tensor *t, char *text, size_t
          size), (t, text, size))
#define tsh_to_string(...) tsh_to_string_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_matmul, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a, tsh_tensor
          *b), (a, b))
#define tsh_matmul(...) tsh_matmul_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_linear, tsh_ctx_of(x ? x : weight ? weight : bias), (TSHI_HERE,
          tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias), (x, weight, bias))
#define tsh_linear(...) tsh_linear_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_embedding, tsh_ctx_of(ids ? ids : weight), (TSHI_HERE, tsh_tensor *ids,
          tsh_tensor *weight, const tsh_lookup_desc *desc), (ids, weight, desc))
#define tsh_embedding(...) tsh_embedding_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_layer_norm, tsh_ctx_of(x ? x : weight ? weight : bias), (TSHI_HERE,
          tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, double eps), (x, weight, bias, eps))
#define tsh_layer_norm(...) tsh_layer_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_rms_norm, tsh_ctx_of(x ? x : weight), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *weight, double eps), (x, weight, eps))
#define tsh_rms_norm(...) tsh_rms_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_rms_norm_with, tsh_ctx_of(x ? x : weight), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *weight, const tsh_rms_norm_desc *desc), (x, weight, desc))
#define tsh_rms_norm_with(...) tsh_rms_norm_with_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_rope, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, const tsh_rope_desc
          *desc), (x, desc))
#define tsh_rope(...) tsh_rope_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_attention, tsh_ctx_of(q ? q : k ? k : v), (TSHI_HERE, tsh_tensor *q,
          tsh_tensor *k, tsh_tensor *v, const tsh_attention_desc *desc), (q, k, v, desc))
#define tsh_attention(...) tsh_attention_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_cross_entropy, tsh_ctx_of(logits ? logits : target), (TSHI_HERE,
          tsh_tensor *logits, tsh_tensor *target, const tsh_cross_entropy_desc *desc), (logits,
          target, desc))
#define tsh_cross_entropy(...) tsh_cross_entropy_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_loss_in_chunks, tsh_ctx_of(x ? x : target), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *target, const tsh_chunks_desc *desc), (x, target, desc))
#define tsh_loss_in_chunks(...) tsh_loss_in_chunks_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_sample, tsh_ctx_of(logits), (TSHI_HERE, tsh_tensor *logits, const
          tsh_sample_desc *desc), (logits, desc))
#define tsh_sample(...) tsh_sample_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_custom_op, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_tensor *const *in, int n,
          tsh_tensor **out, const tsh_custom_op_desc *desc), (ctx, in, n, out, desc))
#define tsh_custom_op(...) tsh_custom_op_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_mse_loss, tsh_ctx_of(x ? x : target), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *target, const tsh_loss_desc *desc), (x, target, desc))
#define tsh_mse_loss(...) tsh_mse_loss_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_l1_loss, tsh_ctx_of(x ? x : target), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *target, const tsh_loss_desc *desc), (x, target, desc))
#define tsh_l1_loss(...) tsh_l1_loss_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_huber_loss, tsh_ctx_of(x ? x : target), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *target, const tsh_loss_desc *desc), (x, target, desc))
#define tsh_huber_loss(...) tsh_huber_loss_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_smooth_l1_loss, tsh_ctx_of(x ? x : target), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *target, const tsh_loss_desc *desc), (x, target, desc))
#define tsh_smooth_l1_loss(...) tsh_smooth_l1_loss_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_binary_cross_entropy, tsh_ctx_of(x ? x : target), (TSHI_HERE,
          tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc), (x, target, desc))
#define tsh_binary_cross_entropy(...) \
    tsh_binary_cross_entropy_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_binary_cross_entropy_with_logits, tsh_ctx_of(x ? x : target),
          (TSHI_HERE, tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc), (x, target,
          desc))
#define tsh_binary_cross_entropy_with_logits(...) \
    tsh_binary_cross_entropy_with_logits_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_kl_div, tsh_ctx_of(x ? x : target), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *target, const tsh_loss_desc *desc), (x, target, desc))
#define tsh_kl_div(...) tsh_kl_div_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_nll_loss, tsh_ctx_of(log_probs ? log_probs : target), (TSHI_HERE,
          tsh_tensor *log_probs, tsh_tensor *target, const tsh_loss_desc *desc), (log_probs, target,
          desc))
#define tsh_nll_loss(...) tsh_nll_loss_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_cosine_similarity, tsh_ctx_of(a ? a : b), (TSHI_HERE, tsh_tensor *a,
          tsh_tensor *b, int dim, double eps), (a, b, dim, eps))
#define tsh_cosine_similarity(...) tsh_cosine_similarity_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_stack, tsh_ctx_of(parts ? parts[0] : NULL), (TSHI_HERE, tsh_tensor
          *const *parts, int n, int dim), (parts, n, dim))
#define tsh_stack(...) tsh_stack_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_squeeze, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim), (x, dim))
#define tsh_squeeze(...) tsh_squeeze_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_unsqueeze, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim), (x,
          dim))
#define tsh_unsqueeze(...) tsh_unsqueeze_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_expand, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, tsh_shape shape), (x,
          shape))
#define tsh_expand(...) tsh_expand_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_tile, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, const int64_t *repeats,
          int n), (x, repeats, n))
#define tsh_tile(...) tsh_tile_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_repeat_interleave, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int64_t
          repeats, int dim), (x, repeats, dim))
#define tsh_repeat_interleave(...) tsh_repeat_interleave_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_pad, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, const int64_t *pad, int
          n, tsh_pad_mode mode, double value), (x, pad, n, mode, value))
#define tsh_pad(...) tsh_pad_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_flip, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim), (x, dim))
#define tsh_flip(...) tsh_flip_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_roll, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int64_t shift, int
          dim), (x, shift, dim))
#define tsh_roll(...) tsh_roll_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_slice_step, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int64_t
          start, int64_t stop, int64_t step), (x, dim, start, stop, step))
#define tsh_slice_step(...) tsh_slice_step_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_tril, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int64_t diagonal), (x,
          diagonal))
#define tsh_tril(...) tsh_tril_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_triu, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int64_t diagonal), (x,
          diagonal))
#define tsh_triu(...) tsh_triu_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_one_hot, tsh_ctx_of(ids), (TSHI_HERE, tsh_tensor *ids, int64_t
          classes), (ids, classes))
#define tsh_one_hot(...) tsh_one_hot_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_gather, tsh_ctx_of(x ? x : index), (TSHI_HERE, tsh_tensor *x, int dim,
          tsh_tensor *index), (x, dim, index))
#define tsh_gather(...) tsh_gather_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_scatter_add, tsh_ctx_of(x ? x : index ? index : src), (TSHI_HERE,
          tsh_tensor *x, int dim, tsh_tensor *index, tsh_tensor *src), (x, dim, index, src))
#define tsh_scatter_add(...) tsh_scatter_add_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_index_select, tsh_ctx_of(x ? x : index), (TSHI_HERE, tsh_tensor *x, int
          dim, tsh_tensor *index), (x, dim, index))
#define tsh_index_select(...) tsh_index_select_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_topk, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int64_t k, int dim, int
          largest, tsh_tensor **indices), (x, k, dim, largest, indices))
#define tsh_topk(...) tsh_topk_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_sort, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int
          descending, tsh_tensor **indices), (x, dim, descending, indices))
#define tsh_sort(...) tsh_sort_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_argsort, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int dim, int
          descending), (x, dim, descending))
#define tsh_argsort(...) tsh_argsort_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_einsum, tsh_ctx_of(a ? a : b), (TSHI_HERE, const char *equation,
          tsh_tensor *a, tsh_tensor *b), (equation, a, b))
#define tsh_einsum(...) tsh_einsum_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_module, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_module_desc *desc), (parent, name, desc))
#define tsh_add_module(...) tsh_add_module_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_find, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          char *path), (module, path))
#define tsh_find(...) tsh_find_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_param, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          char *path), (module, path))
#define tsh_param(...) tsh_param_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_each_param, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, void
               (*fn)(const char *path, tsh_tensor *param, void *user), void *user), (module, fn,
               user))
#define tsh_each_param(...) tsh_each_param_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_tie, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const char
          *name, tsh_tensor *source), (module, name, source))
#define tsh_tie(...) tsh_tie_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_materialize, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module),
          (module))
#define tsh_materialize(...) tsh_materialize_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_reset_parameters, tsh_module_ctx(module), (TSHI_HERE, tsh_module
          *module), (module))
#define tsh_reset_parameters(...) tsh_reset_parameters_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_to, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, tsh_dtype
          dtype), (module, dtype))
#define tsh_to(...) tsh_to_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_train, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, int on), (module,
               on))
#define tsh_train(...) tsh_train_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_checkpoint, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, int on),
               (module, on))
#define tsh_checkpoint(...) tsh_checkpoint_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE_VOID(tsh_zero_grads, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module), (module))
#define tsh_zero_grads(...) tsh_zero_grads_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(size_t, tsh_rng_state, ctx, (TSHI_HERE, tsh_ctx *ctx, void *state, size_t size), (ctx,
          state, size))
#define tsh_rng_state(...) tsh_rng_state_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_set_rng_state, ctx, (TSHI_HERE, tsh_ctx *ctx, const void *state, size_t
          size), (ctx, state, size))
#define tsh_set_rng_state(...) tsh_set_rng_state_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_layer_norm, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_layer_norm_desc *desc), (parent, name, desc))
#define tsh_add_layer_norm(...) tsh_add_layer_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_rms_norm, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_rms_norm_desc *desc), (parent, name, desc))
#define tsh_add_rms_norm(...) tsh_add_rms_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_dropout, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, double p), (parent, name, p))
#define tsh_add_dropout(...) tsh_add_dropout_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_add_param, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          const char *name, tsh_shape shape, const tsh_param_desc *desc), (module, name, shape,
          desc))
#define tsh_add_param(...) tsh_add_param_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_forward_n, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          tsh_tensor **in, int n), (module, in, n))
#define tsh_forward_n(...) tsh_forward_n_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_forward, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          tsh_tensor *x), (module, x))
#define tsh_forward(...) tsh_forward_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_forward_residual, tsh_module_ctx(module), (TSHI_HERE, tsh_module
          *module, tsh_tensor **x, tsh_tensor *y), (module, x, y))
#define tsh_forward_residual(...) tsh_forward_residual_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_parallelize, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          const tsh_plan_rule *rules, int count), (module, rules, count))
#define tsh_parallelize(...) tsh_parallelize_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_plan_report, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          const tsh_plan_rule *rules, int count, FILE *file), (module, rules, count, file))
#define tsh_plan_report(...) tsh_plan_report_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_summary, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, FILE
          *file), (module, file))
#define tsh_summary(...) tsh_summary_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_linear, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_linear_desc *desc), (parent, name, desc))
#define tsh_add_linear(...) tsh_add_linear_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_classifier, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_classifier_desc *desc), (parent, name, desc))
#define tsh_add_classifier(...) tsh_add_classifier_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_embedding, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_embedding_desc *desc), (parent, name, desc))
#define tsh_add_embedding(...) tsh_add_embedding_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_attention, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_attention_layer_desc *desc), (parent, name, desc))
#define tsh_add_attention(...) tsh_add_attention_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_set_segments, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          tsh_tensor *segments), (module, segments))
#define tsh_set_segments(...) tsh_set_segments_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_mlp, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent, const
          char *name, const tsh_mlp_desc *desc), (parent, name, desc))
#define tsh_add_mlp(...) tsh_add_mlp_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_cache *, tsh_cache_new, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          int64_t batch, int64_t length, tsh_dtype dtype), (module, batch, length, dtype))
#define tsh_cache_new(...) tsh_cache_new_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_set_argument, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          const char *name, int64_t value), (module, name, value))
#define tsh_set_argument(...) tsh_set_argument_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_parallelize_policy, tsh_module_ctx(root), (TSHI_HERE, tsh_module *root,
          const tsh_policy *policy), (root, policy))
#define tsh_parallelize_policy(...) tsh_parallelize_policy_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_conv1d, tsh_ctx_of(x ? x : weight ? weight : bias), (TSHI_HERE,
          tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, const tsh_conv_options *options), (x,
          weight, bias, options))
#define tsh_conv1d(...) tsh_conv1d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_conv2d, tsh_ctx_of(x ? x : weight ? weight : bias), (TSHI_HERE,
          tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, const tsh_conv_options *options), (x,
          weight, bias, options))
#define tsh_conv2d(...) tsh_conv2d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_conv_transpose1d, tsh_ctx_of(x ? x : weight ? weight : bias),
          (TSHI_HERE, tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, const tsh_conv_options
          *options), (x, weight, bias, options))
#define tsh_conv_transpose1d(...) tsh_conv_transpose1d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_conv_transpose2d, tsh_ctx_of(x ? x : weight ? weight : bias),
          (TSHI_HERE, tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, const tsh_conv_options
          *options), (x, weight, bias, options))
#define tsh_conv_transpose2d(...) tsh_conv_transpose2d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_max_pool1d, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, const
          tsh_pool_options *options), (x, options))
#define tsh_max_pool1d(...) tsh_max_pool1d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_max_pool2d, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, const
          tsh_pool_options *options), (x, options))
#define tsh_max_pool2d(...) tsh_max_pool2d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_avg_pool1d, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, const
          tsh_pool_options *options), (x, options))
#define tsh_avg_pool1d(...) tsh_avg_pool1d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_avg_pool2d, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, const
          tsh_pool_options *options), (x, options))
#define tsh_avg_pool2d(...) tsh_avg_pool2d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_adaptive_avg_pool1d, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int64_t
          length), (x, length))
#define tsh_adaptive_avg_pool1d(...) tsh_adaptive_avg_pool1d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_adaptive_avg_pool2d, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int64_t
          height, int64_t width), (x, height, width))
#define tsh_adaptive_avg_pool2d(...) tsh_adaptive_avg_pool2d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_interpolate, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, const
          tsh_interpolate_options *options), (x, options))
#define tsh_interpolate(...) tsh_interpolate_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_pixel_shuffle, tsh_ctx_of(x), (TSHI_HERE, tsh_tensor *x, int64_t
          factor), (x, factor))
#define tsh_pixel_shuffle(...) tsh_pixel_shuffle_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_conv1d, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_conv_desc *desc), (parent, name, desc))
#define tsh_add_conv1d(...) tsh_add_conv1d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_conv2d, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_conv_desc *desc), (parent, name, desc))
#define tsh_add_conv2d(...) tsh_add_conv2d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_conv_transpose1d, tsh_module_ctx(parent), (TSHI_HERE, tsh_module
          *parent, const char *name, const tsh_conv_desc *desc), (parent, name, desc))
#define tsh_add_conv_transpose1d(...) \
    tsh_add_conv_transpose1d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_conv_transpose2d, tsh_module_ctx(parent), (TSHI_HERE, tsh_module
          *parent, const char *name, const tsh_conv_desc *desc), (parent, name, desc))
#define tsh_add_conv_transpose2d(...) \
    tsh_add_conv_transpose2d_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_batch_norm, tsh_ctx_of(x ? x : weight ? weight : bias ? bias :
          running_mean ? running_mean : running_var), (TSHI_HERE, tsh_tensor *x, tsh_tensor *weight,
          tsh_tensor *bias, tsh_tensor *running_mean, tsh_tensor *running_var, const
          tsh_batch_norm_options *options), (x, weight, bias, running_mean, running_var, options))
#define tsh_batch_norm(...) tsh_batch_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_batch_norm, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_batch_norm_desc *desc), (parent, name, desc))
#define tsh_add_batch_norm(...) tsh_add_batch_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_group_norm, tsh_ctx_of(x ? x : weight ? weight : bias), (TSHI_HERE,
          tsh_tensor *x, int64_t groups, tsh_tensor *weight, tsh_tensor *bias, double eps), (x,
          groups, weight, bias, eps))
#define tsh_group_norm(...) tsh_group_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_instance_norm, tsh_ctx_of(x ? x : weight ? weight : bias), (TSHI_HERE,
          tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, double eps), (x, weight, bias, eps))
#define tsh_instance_norm(...) tsh_instance_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_group_norm, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent,
          const char *name, const tsh_group_norm_desc *desc), (parent, name, desc))
#define tsh_add_group_norm(...) tsh_add_group_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_instance_norm, tsh_module_ctx(parent), (TSHI_HERE, tsh_module
          *parent, const char *name, const tsh_instance_norm_desc *desc), (parent, name, desc))
#define tsh_add_instance_norm(...) tsh_add_instance_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_lstm, tsh_ctx_of(x ? x : h0 ? h0 : c0), (TSHI_HERE, tsh_tensor *x,
          tsh_tensor *const *weights, int count, tsh_tensor *h0, tsh_tensor *c0, const
          tsh_recurrent_desc *desc, tsh_tensor **h, tsh_tensor **c), (x, weights, count, h0, c0,
          desc, h, c))
#define tsh_lstm(...) tsh_lstm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_gru, tsh_ctx_of(x ? x : h0), (TSHI_HERE, tsh_tensor *x, tsh_tensor
          *const *weights, int count, tsh_tensor *h0, const tsh_recurrent_desc *desc, tsh_tensor
          **h), (x, weights, count, h0, desc, h))
#define tsh_gru(...) tsh_gru_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_lstm, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent, const
          char *name, const tsh_recurrent_desc *desc), (parent, name, desc))
#define tsh_add_lstm(...) tsh_add_lstm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_module *, tsh_add_gru, tsh_module_ctx(parent), (TSHI_HERE, tsh_module *parent, const
          char *name, const tsh_recurrent_desc *desc), (parent, name, desc))
#define tsh_add_gru(...) tsh_add_gru_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_lstm_forward, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          tsh_tensor *x, tsh_tensor *h0, tsh_tensor *c0, tsh_tensor **h, tsh_tensor **c), (module,
          x, h0, c0, h, c))
#define tsh_lstm_forward(...) tsh_lstm_forward_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_tensor *, tsh_gru_forward, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          tsh_tensor *x, tsh_tensor *h0, tsh_tensor **h), (module, x, h0, h))
#define tsh_gru_forward(...) tsh_gru_forward_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_optim *, tsh_optim_new, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          tsh_optim_desc *desc), (module, desc))
#define tsh_optim_new(...) tsh_optim_new_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_clip_grad_norm, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          double max_norm, double *norm), (module, max_norm, norm))
#define tsh_clip_grad_norm(...) tsh_clip_grad_norm_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_freeze, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          char *pattern), (module, pattern))
#define tsh_freeze(...) tsh_freeze_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_unfreeze, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          char *pattern), (module, pattern))
#define tsh_unfreeze(...) tsh_unfreeze_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_lora, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const char
          *pattern, const tsh_lora_desc *desc), (module, pattern, desc))
#define tsh_lora(...) tsh_lora_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_lora_use, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          char *name), (module, name))
#define tsh_lora_use(...) tsh_lora_use_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_lora_merge, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module),
          (module))
#define tsh_lora_merge(...) tsh_lora_merge_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_lora_unmerge, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module),
          (module))
#define tsh_lora_unmerge(...) tsh_lora_unmerge_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_lora_free, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          char *name), (module, name))
#define tsh_lora_free(...) tsh_lora_free_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_ema *, tsh_ema_new, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, double
          decay), (module, decay))
#define tsh_ema_new(...) tsh_ema_new_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_outer *, tsh_outer_new, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module,
          tsh_optim *optim, const tsh_outer_desc *desc), (module, optim, desc))
#define tsh_outer_new(...) tsh_outer_new_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_quantize, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          char *pattern, tsh_dtype dtype), (module, pattern, dtype))
#define tsh_quantize(...) tsh_quantize_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_pipeline *, tsh_pipeline_new, tsh_module_ctx(container), (TSHI_HERE, tsh_module
          *container, const tsh_pipeline_desc *desc), (container, desc))
#define tsh_pipeline_new(...) tsh_pipeline_new_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_save, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const char
          *path, const tsh_optim *optim), (module, path, optim))
#define tsh_save(...) tsh_save_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_save_with, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          char *path, const tsh_optim *optim, const tsh_file_desc *desc), (module, path, optim,
          desc))
#define tsh_save_with(...) tsh_save_with_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_load, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const char
          *path, tsh_optim *optim), (module, path, optim))
#define tsh_load(...) tsh_load_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_load_with, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module, const
          char *path, tsh_optim *optim, const tsh_file_desc *desc), (module, path, optim, desc))
#define tsh_load_with(...) tsh_load_with_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(double, tsh_gradcheck, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_gradcheck_fn fn, tsh_tensor
          **in, int n, void *user, double eps, int64_t samples), (ctx, fn, in, n, user, eps,
          samples))
#define tsh_gradcheck(...) tsh_gradcheck_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(int, tsh_check_replicas, tsh_module_ctx(module), (TSHI_HERE, tsh_module *module),
          (module))
#define tsh_check_replicas(...) tsh_check_replicas_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(uint64_t, tsh_hash, ctx, (TSHI_HERE, tsh_ctx *ctx, tsh_tensor *t), (ctx, t))
#define tsh_hash(...) tsh_hash_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_trace_begin, ctx, (TSHI_HERE, tsh_ctx *ctx, const tsh_trace_desc *desc),
          (ctx, desc))
#define tsh_trace_begin(...) tsh_trace_begin_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_trace_end, ctx, (TSHI_HERE, tsh_ctx *ctx), (ctx))
#define tsh_trace_end(...) tsh_trace_end_placed(__FILE__, __LINE__, __VA_ARGS__)
TSHI_WHERE(tsh_result, tsh_profile, ctx, (TSHI_HERE, tsh_ctx *ctx, int on), (ctx, on))
#define tsh_profile(...) tsh_profile_placed(__FILE__, __LINE__, __VA_ARGS__)

#undef TSHI_HERE
#undef TSHI_WHERE
#undef TSHI_WHERE_VOID

#ifdef __cplusplus
}
#endif
#endif
