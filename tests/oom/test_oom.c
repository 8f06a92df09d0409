/* Every request for memory that can fail, fails once, and once with all after it: each time the
 * answer is TSH_ERR_MEMORY, on every rank that is still at work; nothing leaks, crashes or hangs.
 */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/small_gpt.h"
#include "../support/counting.h"
#include "../support/files.h"

static counting memory;

/* ----------------------------------------------------------------------- the work
 * Tensors of more than a chunk of the step pool, so that every op asks the allocator. */

enum { ROWS = 80, WIDTH = 1024 };

static tsh_tensor *leaf(tsh_ctx *ctx, tsh_shape shape, const char *layout) {
    tsh_layout l = spec_layout(layout, 1);
    return tsh_requires_grad(tsh_tensor_new(ctx, TSH_REAL, shape, l), 1);
}

static tsh_tensor *wide(tsh_ctx *ctx, const char *layout) {
    return leaf(ctx, tsh_shape2(ROWS, WIDTH), layout);
}

static void finish(tsh_ctx *ctx, tsh_tensor *y) {
    (void)tsh_backward(ctx, tsh_full_tensor(tsh_sum(y, TSH_ALL, 0)));
    (void)tsh_step_end(ctx);
}

static void work_map(tsh_ctx *ctx) {
    tsh_tensor *x = wide(ctx, "S(0)"), *b = leaf(ctx, tsh_shape1(WIDTH), "R");
    tsh_tensor *y = tsh_gelu(tsh_add(tsh_mul(x, x), b));
    y = tsh_where(tsh_lt(y, x), tsh_dropout(y, 0.5, NULL), tsh_clone(x));
    finish(ctx, tsh_div(y, tsh_add_scalar(tsh_exp(b), 1)));
}

static void work_reduce(tsh_ctx *ctx) {
    tsh_tensor *x = wide(ctx, "S(0)"), *y = tsh_transpose(x, 0, 1); /* strides that need a copy */
    (void)tsh_argmax(y, 0, 0);
    y = tsh_add(tsh_softmax(y, 0), tsh_log_softmax(y, 0));
    finish(ctx, tsh_add(tsh_max(y, 0, 0), tsh_mean(y, 0, 0)));
}

static void work_view(tsh_ctx *ctx) {
    tsh_tensor *x = wide(ctx, "S(0)"), *part[2] = {NULL, NULL};
    (void)tsh_split(x, 1, 2, part);
    x = tsh_concat(part, 2, 1);
    x = tsh_reshape(tsh_transpose(tsh_reshape(x, tsh_shape3(ROWS, 32, 32)), 1, 2),
                    tsh_shape2(ROWS, WIDTH));
    finish(ctx, tsh_slice(x, 1, 3, 500));
}

static void work_matmul(tsh_ctx *ctx) {
    tsh_tensor *x = wide(ctx, "R"), *w = leaf(ctx, tsh_shape2(WIDTH, WIDTH), "S(1)");
    tsh_tensor *column = leaf(ctx, tsh_shape2(WIDTH, WIDTH), "S(0)");
    tsh_tensor *b = leaf(ctx, tsh_shape1(WIDTH), "S(0)");
    finish(ctx, tsh_matmul(tsh_linear(x, column, b), tsh_transpose(w, 0, 1)));
}

static void work_row(tsh_ctx *ctx) {
    tsh_tensor *w = leaf(ctx, tsh_shape2(WIDTH, WIDTH), "S(1)");
    finish(ctx, tsh_linear(tsh_neg(wide(ctx, "R")), w, leaf(ctx, tsh_shape1(WIDTH), "R")));
}

static void work_norm(tsh_ctx *ctx) {
    tsh_tensor *w = leaf(ctx, tsh_shape1(WIDTH), "R"), *b = leaf(ctx, tsh_shape1(WIDTH), "R");
    const tsh_layer_norm_desc desc = {.dim = WIDTH};
    tsh_tensor *x = wide(ctx, "S(0)");
    tsh_module *norm = tsh_add_layer_norm(tsh_root(ctx), "norm", &desc);
    tsh_tensor *y = tsh_forward_residual(norm, &x, tsh_layer_norm(tsh_neg(x), w, b, 0));
    finish(ctx, tsh_add(x, y));
}

static void work_rope(tsh_ctx *ctx) {
    tsh_tensor *w = leaf(ctx, tsh_shape1(WIDTH), "R");
    finish(ctx, tsh_rms_norm(tsh_rope(tsh_neg(wide(ctx, "S(0)")), NULL), w, 0));
}

static void work_grouped(tsh_ctx *ctx) {
    tsh_shape shape = tsh_shape4(2, 4, 130, 80), few = tsh_shape4(2, 2, 130, 80);
    tsh_tensor *q = leaf(ctx, shape, "S(1)"), *k = leaf(ctx, few, "R");
    finish(ctx, tsh_attention(q, tsh_neg(k), k, NULL));
}

static void work_attention(tsh_ctx *ctx) {
    const tsh_attention_desc desc = {.causal = 1, .dropout = 0.1};
    tsh_shape shape = tsh_shape4(2, 4, 130, 80);
    tsh_tensor *q = leaf(ctx, shape, "S(1)"), *k = leaf(ctx, shape, "S(1)");
    finish(ctx, tsh_attention(tsh_neg(q), k, leaf(ctx, shape, "S(1)"), &desc));
}

/* Layers with a cache, and an id from logits whose vocabulary is sharded. */
static void work_generate(tsh_ctx *ctx) {
    const tsh_attention_layer_desc attention = {.dim = WIDTH, .heads = 8, .kv_heads = 2};
    const tsh_mlp_desc mlp = {.dim = WIDTH, .hidden = WIDTH, .gated = 1};
    const tsh_sample_desc filters = {.top_k = 50, .top_p = 0.9};
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *x = tsh_zeros(ctx, tsh_shape3(1, ROWS, WIDTH));
    tsh_cache *cache;
    (void)tsh_add_attention(root, "attn", &attention);
    (void)tsh_add_mlp(root, "mlp", &mlp);
    cache = tsh_cache_new(root, 1, ROWS, TSH_DTYPE_DEFAULT);
    tsh_no_grad_begin(ctx);
    x = tsh_redistribute(tsh_forward(root, x), tsh_sharded(-1));
    (void)tsh_argmax(x, -1, 0);
    (void)tsh_sample(x, &filters);
    tsh_no_grad_end(ctx);
    tsh_cache_free(cache);
    (void)tsh_step_end(ctx);
}

static void work_loss(tsh_ctx *ctx) {
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, tsh_shape1(ROWS), tsh_replicated());
    tsh_tensor *table = leaf(ctx, tsh_shape2(WIDTH, 1100), "S(0)");
    tsh_tensor *x = tsh_full_tensor(tsh_embedding(ids, table, NULL));
    finish(ctx, tsh_cross_entropy(tsh_linear(x, leaf(ctx, tsh_shape2(WIDTH, 1100), "S(0)"), NULL),
                                  ids, NULL));
}

/* Weights that are cut, probabilities that are not, strides that need a copy. */
static void work_loss_options(tsh_ctx *ctx) {
    tsh_cross_entropy_desc desc = {.label_smoothing = 0.1, .z_loss = 0.1};
    tsh_tensor *x = tsh_transpose(leaf(ctx, tsh_shape2(WIDTH, ROWS), "S(0)"), 0, 1);
    tsh_tensor *t = tsh_transpose(leaf(ctx, tsh_shape2(WIDTH, ROWS), "R"), 0, 1);
    desc.weight = leaf(ctx, tsh_shape1(WIDTH), "S(0)");
    finish(ctx, tsh_cross_entropy(x, t, &desc));
    desc.weight = leaf(ctx, tsh_shape1(WIDTH), "R");
    finish(ctx, tsh_cross_entropy(tsh_neg(wide(ctx, "S(1)")), wide(ctx, "S(1)"), &desc));
}

static void work_init(tsh_ctx *ctx) {
    tsh_linear_desc desc = {.in = WIDTH, .out = ROWS};
    tsh_module *layer;
    desc.style = TSH_COLWISE;
    desc.weight_init.kind = TSH_INIT_ORTHOGONAL;
    layer = tsh_add_linear(tsh_root(ctx), "layer", &desc);
    (void)tsh_materialize(layer);
    (void)tsh_init_orthogonal(
        tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(4, 9000), tsh_replicated()), NULL);
    (void)tsh_reset_parameters(layer);
    (void)tsh_step_end(ctx);
}

static void work_operators(tsh_ctx *ctx) {
    tsh_tensor *x = tsh_transpose(tsh_tp_copy(tsh_neg(wide(ctx, "R")), TSH_SUM), 0, 1);
    x = tsh_tp_gather(tsh_set_layout(tsh_tp_scatter(x, 0), tsh_replicated()), 1);
    x = tsh_set_layout(tsh_tp_copy(tsh_transpose(x, 0, 1), TSH_MAX), tsh_partial());
    finish(ctx, tsh_tp_reduce(x, TSH_SUM));
}

/* Many short rows: then what is kept per row is more than a chunk, too. */
enum { TALL = 70000 };

static void work_tall(tsh_ctx *ctx) {
    tsh_tensor *w = leaf(ctx, tsh_shape1(2), "R"), *table = leaf(ctx, tsh_shape2(2, 2), "R");
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(2, TALL / 2), tsh_replicated());
    tsh_tensor *x;
    ids = tsh_transpose(ids, 0, 1); /* strides that need a copy */
    x = tsh_layer_norm(tsh_embedding(ids, table, NULL), w, NULL, 0);
    x = tsh_cross_entropy(x, ids, NULL);
    finish(ctx, x);
}

/* Every option of a lookup, and a row-sparse step: counts, norms and marks of more than a chunk. */
static void work_lookup(tsh_ctx *ctx) {
    tsh_embedding_desc desc = {.count = TALL, .dim = 2, .style = TSH_ROWWISE};
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    tsh_module *table;
    tsh_optim *optim;
    desc.lookup.padding = desc.lookup.scale_grad_by_freq = desc.lookup.sparse = 1;
    desc.lookup.max_norm = 1;
    table = tsh_add_embedding(tsh_root(ctx), "table", &desc);
    optim = table ? tsh_optim_new(table, &adam) : NULL;
    (void)tsh_backward(
        ctx, tsh_full_tensor(
                 tsh_sum(tsh_forward(table, tsh_arange(ctx, TSH_I32, 0, TALL, 1)), TSH_ALL, 0)));
    (void)tsh_optim_step(optim);
    if (table) tsh_zero_grads(table);
    (void)tsh_step_end(ctx);
}

static void work_tall_attention(tsh_ctx *ctx) {
    tsh_tensor *q = leaf(ctx, tsh_shape4(1, 1, TALL, 1), "R");
    tsh_tensor *k = leaf(ctx, tsh_shape4(1, 1, 1, 1), "R");
    finish(ctx, tsh_attention(q, k, k, NULL));
}

static void work_redistribute(tsh_ctx *ctx) {
    static const char *const path[] = {"S(1)", "S(1, 2 segments, unit 8)", "S(0)", "R", "P", "S(1)",
                                       "R"};
    tsh_tensor *x = wide(ctx, "R");
    double *values;
    int i;
    for (i = 0; i < COUNT(path); i++) x = tsh_redistribute(tsh_neg(x), spec_layout(path[i], 1));
    x = tsh_redistribute(x, tsh_sharded(1));
    values = x ? ranks_values(ctx, x) : NULL;
    free(values);
    (void)tsh_hash(ctx, x);
    finish(ctx, x);
}

static void copy_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    (void)user, (void)n;
    memcpy(y, tsh_data(tsh_ctx_of(in[0]), in[0]), (size_t)tsh_local_numel(in[0]) * sizeof *y);
}

static void copy_backward(tsh_tensor *const *in, int n, const void *const *out,
                          const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    const tsh_real *dy = grad_out[0];
    (void)user, (void)n, (void)out;
    if (grad_in[0]) memcpy(grad_in[0], dy, (size_t)tsh_local_numel(in[0]) * sizeof *dy);
}

static void work_custom(tsh_ctx *ctx) {
    tsh_custom_op_desc desc = {.name = "copy", .forward = copy_forward, .backward = copy_backward};
    tsh_tensor *x = tsh_transpose(wide(ctx, "R"), 0, 1);
    desc.out[0].shape = tsh_shape_of(x);
    desc.out[0].layout = tsh_replicated();
    x = tsh_custom_op(ctx, &x, 1, NULL, &desc);
    (void)tsh_tensor_free(tsh_keep(x));
    finish(ctx, x);
}

static void work_gpt(tsh_ctx *ctx) {
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .clip_norm = 1};
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    tsh_module *gpt = gpt_add(ctx);
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_tensor *targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_optim *optim;
    int step;
    tsh_checkpoint(tsh_find(gpt, "h.0"), 1);
    (void)tsh_materialize(gpt); /* first whole, so that sharding needs memory too */
    (void)tsh_parallelize(gpt, gpt_plan, GPT_RULES);
    optim = tsh_optim_new(gpt, &adamw);
    for (step = 0; step < 2 && tsh_ok(ctx); step++) (void)gpt_step(ctx, optim, ids, targets, step);
    (void)tsh_check_replicas(gpt);
}

/* Three layers' gradients and parameters over dp, in buckets of several or each alone; with zero,
 * moments in chunks. */
static tsh_optim *replicas(tsh_ctx *ctx, int zero) {
    const tsh_linear_desc d = {.in = WIDTH, .out = ROWS}, back = {.in = ROWS, .out = WIDTH};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .clip_norm = 1, .zero = zero};
    const tsh_backward_desc first = {.defer = 1, .summed = 1, .weight = 3},
                            second = {.summed = 1, .weight = 2};
    tsh_module *root = tsh_root(ctx);
    tsh_optim *optim;
    int half;
    (void)tsh_add_linear(root, "0", &d);
    (void)tsh_add_linear(root, "1", &back);
    (void)tsh_add_linear(root, "2", &d);
    if (!tsh_ok(ctx)) return NULL; /* told, as in work_load */
    optim = tsh_optim_new(root, &adam);
    for (half = 0; half < 2; half++) {
        tsh_tensor *y = tsh_forward(root, tsh_ones(ctx, tsh_shape2(1, WIDTH)));
        (void)tsh_backward_with(ctx, tsh_sum(y, TSH_ALL, 0), half ? &second : &first);
        (void)tsh_step_end(ctx);
    }
    (void)tsh_optim_step(optim);
    return tsh_ok(ctx) ? optim : NULL;
}

static void work_replicas(tsh_ctx *ctx) {
    (void)replicas(ctx, 0);
}

static void work_zero(tsh_ctx *ctx) {
    (void)replicas(ctx, 1);
}

/* Chunks that are compared, saved and loaded. */
static void work_zero_file(tsh_ctx *ctx) {
    tsh_optim *optim = replicas(ctx, 1);
    if (!optim || !tsh_check_replicas(tsh_root(ctx))) return;
    (void)tsh_save(tsh_root(ctx), files_path("checkpoint"), optim);
    if (tsh_ok(ctx)) (void)tsh_load(tsh_root(ctx), files_path("checkpoint"), optim);
}

static tsh_tensor *pipeline_input(tsh_ctx *ctx, int k, void *user) {
    (void)k, (void)user;
    return tsh_ones(ctx, tsh_shape2(ROWS, WIDTH));
}

static tsh_tensor *pipeline_loss(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    (void)ctx, (void)k, (void)user;
    return tsh_sum(y, TSH_ALL, 0);
}

static double pipeline_weight(tsh_ctx *ctx, int k, void *user) {
    (void)ctx, (void)user;
    return k;
}

/* A layer per stage, whose weight both share. */
static void pipeline_of(tsh_ctx *ctx, tsh_pipeline_schedule schedule, int weighs) {
    const tsh_linear_desc d = {.in = WIDTH, .out = WIDTH};
    const tsh_pipeline_desc desc = {.micro_batches = 3,
                                    .schedule = schedule,
                                    .input = pipeline_input,
                                    .loss = pipeline_loss,
                                    .weight = weighs ? pipeline_weight : NULL};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipeline;
    double loss;
    (void)tsh_add_linear(h, "0", &d);
    (void)tsh_add_linear(h, "1", &d);
    if (!tsh_ok(ctx)) return; /* told, as in work_load */
    (void)tsh_tie(tsh_child(h, 1), "weight", tsh_param(h, "0.weight"));
    pipeline = tsh_pipeline_new(h, &desc);
    (void)tsh_pipeline_train(pipeline, &loss);
    (void)tsh_step_end(ctx);
    (void)tsh_pipeline_evaluate(pipeline, 2, &loss);
    (void)tsh_check_replicas(tsh_root(ctx));
    if (tsh_ok(ctx)) (void)tsh_save(tsh_root(ctx), files_path("checkpoint"), NULL);
}

static void work_pipeline(tsh_ctx *ctx) {
    pipeline_of(ctx, TSH_PIPELINE_1F1B, 0);
}

static void work_gpipe(tsh_ctx *ctx) {
    pipeline_of(ctx, TSH_PIPELINE_GPIPE, 1);
}

/* Arguments with long names, so that they need pages of their own, and a policy for all blocks. */
static void work_policy(tsh_ctx *ctx) {
    static const tsh_policy_heads heads = {.heads = "attn.heads"};
    static const tsh_policy_layer qkv[] = {
        {.weight = "attn.c_attn.weight", .n_fused = 3, .heads = &heads}, {0}};
    static const tsh_policy_layer out[] = {{.weight = "attn.c_proj.weight", .heads = &heads}, {0}};
    static const tsh_policy policy = {.blocks = "h.*", .attn_qkv = qkv, .attn_out = out};
    tsh_module *gpt = gpt_add(ctx);
    char name[2048];
    int i, j;
    for (i = 0; i < GPT_LAYERS; i++) {
        tsh_module *attn = tsh_find(gpt, i ? "h.1.attn" : "h.0.attn");
        for (j = 0; j < 12; j++) {
            memset(name, 'a' + j, sizeof name);
            name[sizeof name - 1] = '\0';
            (void)tsh_set_argument(attn, name, j);
        }
        (void)tsh_set_argument(attn, "heads", GPT_HEADS);
    }
    (void)tsh_materialize(gpt);
    (void)tsh_parallelize_policy(gpt, &policy);
    (void)tsh_step_end(ctx);
}

static int take_text(const char *text, size_t size, void *user) {
    (void)user, (void)text, (void)size;
    return 1;
}

static void work_trace(tsh_ctx *ctx) {
    const tsh_trace_desc desc = {.print = take_text};
    (void)tsh_trace_begin(ctx, &desc);
    work_gpt(ctx);
    (void)tsh_trace_end(ctx);
}

/* A gradient check, in double scopes. */
static tsh_tensor *square(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    (void)ctx, (void)n, (void)user;
    return tsh_sum(tsh_mul(in[0], in[0]), TSH_ALL, 0);
}

static void ignore(const char *message, void *user) {
    (void)user, (void)message;
}

static void work_profile(tsh_ctx *ctx) {
    (void)tsh_profile(ctx, 1);
    work_gpt(ctx);
    (void)tsh_profile(ctx, 0);
}

/* Parameters and a buffer without a layer, in a file, too. */
static void work_params(tsh_ctx *ctx) {
    const tsh_param_desc buffer = {.buffer = 1};
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    const tsh_plan_rule rule = {.path = "scale", .style = TSH_COLWISE};
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *scale = tsh_add_param(root, "scale", tsh_shape1(WIDTH), NULL);
    tsh_tensor *shift = tsh_add_param(root, "shift", tsh_shape2(ROWS, WIDTH), &buffer);
    tsh_optim *optim;
    (void)tsh_parallelize(root, &rule, 1);
    (void)tsh_materialize(root);
    optim = tsh_optim_new(root, &adam);
    scale = tsh_redistribute(scale, tsh_replicated());
    finish(ctx, tsh_mul(tsh_add(wide(ctx, "R"), shift), scale));
    (void)tsh_optim_step(optim);
    (void)tsh_step_end(ctx); /* reports this rank's error to the other rank */
}

static void work_gradcheck(tsh_ctx *ctx) {
    tsh_tensor *x = wide(ctx, "R");
    (void)tsh_gradcheck(ctx, square, &x, 1, NULL, 0, 2);
}

/* A checkpoint written and read: no temporary file may be left. The model is saved as it was made,
 * trained on, and loaded; a rank that fails is one error on both. */
static void work_save(tsh_ctx *ctx) {
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    const tsh_linear_desc d = {.in = WIDTH, .out = 100, .style = TSH_COLWISE};
    tsh_module *m = tsh_add_linear(tsh_root(ctx), "m", &d);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &adam);
    finish(ctx, m ? tsh_forward(m, tsh_zeros(ctx, tsh_shape2(1, WIDTH))) : NULL);
    (void)tsh_optim_step(optim);
    if (!tsh_ok(ctx)) return;
    (void)tsh_save(tsh_root(ctx), files_path("checkpoint"), optim);
}

/* Into a model without memory. */
static void work_load(tsh_ctx *ctx) {
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    const tsh_linear_desc d = {.in = WIDTH, .out = 100, .style = TSH_ROWWISE};
    (void)tsh_add_linear(tsh_root(ctx), "m", &d);
    if (!tsh_ok(ctx)) return; /* told: there may be no root that tsh_load could tell it by */
    (void)tsh_load(tsh_root(ctx), files_path("checkpoint"), tsh_optim_new(tsh_root(ctx), &adam));
}

typedef struct job {
    const char *name;
    void (*work)(tsh_ctx *ctx);
    int tp, pp; /* of two ranks; 0: what pp leaves, 1 */
    size_t bucket_bytes;
} job;

static const job jobs[] = {
    {"map", work_map, 0, 0, 0},
    {"reduce", work_reduce, 0, 0, 0},
    {"view", work_view, 0, 0, 0},
    {"matmul", work_matmul, 0, 0, 0},
    {"row", work_row, 0, 0, 0},
    {"norm", work_norm, 0, 0, 0},
    {"rope", work_rope, 0, 0, 0},
    {"attention", work_attention, 0, 0, 0},
    {"grouped", work_grouped, 0, 0, 0},
    {"lookup", work_lookup, 0, 0, 0},
    {"generate", work_generate, 0, 0, 0},
    {"loss", work_loss, 0, 0, 0},
    {"loss options", work_loss_options, 0, 0, 0},
    {"init", work_init, 0, 0, 0},
    {"tall", work_tall, 0, 0, 0},
    {"tall attention", work_tall_attention, 0, 0, 0},
    {"redistribute", work_redistribute, 0, 0, 0},
    {"operators", work_operators, 0, 0, 0},
    {"custom", work_custom, 0, 0, 0},
    {"gpt", work_gpt, 0, 0, 0},
    {"save", work_save, 0, 0, 0}, /* and then */
    {"load", work_load, 0, 0, 0},
    {"policy", work_policy, 0, 0, 0},
    {"replicas", work_replicas, 1, 0, 0},
    {"replicas, leaves alone", work_replicas, 1, 0, 1},
    {"zero", work_zero_file, 1, 0, 0},
    {"zero, leaves alone", work_zero, 1, 0, 1},
    {"pipeline", work_pipeline, 0, 2, 0},
    {"gpipe", work_gpipe, 0, 2, 0},
    {"gradcheck", work_gradcheck, 0, 0, 0},
    {"trace", work_trace, 0, 0, 0},
    {"profile", work_profile, 0, 0, 0},
    {"parameters", work_params, 0, 0, 0},
};

/* --------------------------------------------------------------------- one rank */

static void expect_clean(const char *name) {
    if (files_count() > 1) fail_msg("%s: a temporary file is left", name);
    if (memory.broken) fail_msg("%s: %s", name, memory.broken);
    if (memory.live || memory.blocks)
        fail_msg("%s, request %lu: %zu bytes in %zu blocks are left", name,
                 (unsigned long)memory.fail_at, memory.live, memory.blocks);
}

/* Returns how many requests failed. */
static uint64_t try_alone(const job *j, int fails, uint64_t fail_at) {
    tsh_desc desc = {.tp = 0};
    tsh_ctx *ctx = NULL;
    tsh_result result;
    counting_begin(&memory, &desc);
    desc.logger.log = ignore;
    memory.fails = fails;
    memory.fail_at = fail_at;
    result = tsh_open(&desc, &ctx);
    if (result == TSH_OK) {
        j->work(ctx);
        result = tsh_ok(ctx) ? TSH_OK : tsh_last_error(ctx)->code;
    }
    if (result != (memory.failed ? TSH_ERR_MEMORY : TSH_OK))
        fail_msg("%s, request %lu: %s, %s", j->name, (unsigned long)fail_at,
                 tsh_result_name(result), tsh_last_error(ctx)->message);
    if (ctx && result != TSH_OK) {
        assert_true(strlen(tsh_last_error(ctx)->message) > 20); /* a sentence */
        assert_null(tsh_zeros(ctx, tsh_shape1(1)));
        (void)tsh_step_end(ctx);
        if (tsh_mem_stats(ctx).step_live)
            fail_msg("%s, request %lu: %zu bytes of step memory are lost (%s)", j->name,
                     (unsigned long)fail_at, tsh_mem_stats(ctx).step_live,
                     tsh_last_error(ctx)->message);
    }
    tsh_close(ctx);
    expect_clean(j->name);
    return memory.failed;
}

static void any_request_may_fail_on_one_rank(void **state) {
    int i, fails;
    uint64_t n;
    (void)state;
    for (i = 0; i < COUNT(jobs); i++)
        for (fails = 1; fails <= 2; fails++) {
            for (n = 0; try_alone(&jobs[i], fails, n); n++) continue;
            assert_true(n > 5);
        }
}

/* An error of memory that was not told can be cleared; the ctx goes on. */
static void work_goes_on_after_memory_is_back(void **state) {
    tsh_desc desc = {.tp = 0};
    tsh_ctx *ctx = NULL;
    tsh_tensor *x;
    (void)state;
    counting_begin(&memory, &desc);
    assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
    x = wide(ctx, "R");
    memory.fails = 2;
    assert_null(tsh_neg(x));
    assert_int_equal(tsh_last_error(ctx)->code, TSH_ERR_MEMORY);
    memory.fails = 0;
    tsh_clear_error(ctx);
    finish(ctx, tsh_neg(x));
    assert_true(tsh_ok(ctx));
    assert_non_null(tsh_grad(x));
    tsh_close(ctx);
    expect_clean("after an error");
}

/* -------------------------------------------------------------------- two ranks */

/* A rank that gets no memory, not even for a ctx, tells its peer so. */
static int shared_work(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    tsh_result code;
    j->work(ctx);
    (void)tsh_barrier(tsh_world(ctx)); /* so that a rank that is through hears of the other */
    code = tsh_ok(ctx) ? TSH_OK : tsh_last_error(ctx)->code;
    CHECK(code == TSH_OK || code == TSH_ERR_MEMORY, "%s: %s", j->name,
          tsh_last_error(ctx)->message);
    CHECK(code != TSH_OK || !memory.failed, "%s: a failure was not told", j->name);
    return 0;
}

static uint64_t try_two(const job *j, int fails, int only, uint64_t fail_at) {
    tsh_desc desc = {.tp = j->tp, .pp = j->pp, .bucket_bytes = j->bucket_bytes};
    job copy = *j;
    int r;
    counting_begin(&memory, &desc);
    desc.logger.log = ignore;
    memory.fails = fails;
    memory.fail_at = fail_at;
    memory.only = only;
    (void)setenv("TSHARD_TIMEOUT", "20", 1);
    memset(ranks_failure, 0, sizeof ranks_failure);
    (void)tsh_threads_run(2, &desc, shared_work, &copy);
    for (r = 0; r < 2; r++)
        if (ranks_failure[r][0])
            fail_msg("%s, request %lu: %s", j->name, (unsigned long)fail_at, ranks_failure[r]);
    expect_clean(j->name);
    return memory.failed;
}

static void any_request_may_fail_on_one_or_both_of_two_ranks(void **state) {
    int i, fails, only;
    uint64_t n;
    (void)state;
    for (i = 0; i < COUNT(jobs); i++)
        for (fails = 1; fails <= 2; fails++)
            for (only = -1; only <= 0; only++)
                for (n = 0; try_two(&jobs[i], fails, only, n); n++) continue;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_request_may_fail_on_one_rank),
        cmocka_unit_test(work_goes_on_after_memory_is_back),
        cmocka_unit_test(any_request_may_fail_on_one_or_both_of_two_ranks),
    };
    return cmocka_run_group_tests_name("oom", tests, files_begin, files_end);
}
