/* tsh_set_segments: attention layers use the segments of their forward, also when backward runs
 * them again after others were set (tsh_checkpoint), and on all stages of a pipeline. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

enum { B = 2, T = 40, C = 16, LAYERS = 4, BATCHES = 3 };

static const int32_t lengths[BATCHES][B][4] = {{{13, 20, 7, 0}, {40, 0, 0, 0}},
                                               {{1, 30, 4, 5}, {10, 10, 10, 10}},
                                               {{25, 15, 0, 0}, {6, 28, 6, 0}}};

/* The segments of micro-batch k; the last one of four in a row is padding. */
static tsh_tensor *segments_of(tsh_ctx *ctx, int k) {
    int32_t ids[B * T];
    for (int b = 0, e = 0; b < B; b++)
        for (int s = 0; s < 4; s++)
            for (int i = 0; i < lengths[k][b][s]; i++) ids[e++] = s < 3 ? s : -1;
    return tsh_from(ctx, ids, tsh_shape2(B, T), TSH_I32);
}

static tsh_tensor *input_of(tsh_ctx *ctx, int k) {
    float x[B * T * C];
    for (int e = 0; e < B * T * C; e++)
        x[e] = (float)(ranks_mix(50 + (uint64_t)k, (uint64_t)e) % 1000) / 500 - 1;
    return tsh_from(ctx, x, tsh_shape3(B, T, C), TSH_F32);
}

static tsh_module *model(tsh_ctx *ctx, int checkpoint) {
    const tsh_rope_desc rope = {.base = 10000};
    const tsh_attention_layer_desc desc = {
        .dim = C, .heads = 4, .kv_heads = 2, .rope = &rope, .attention = {.causal = 1}};
    tsh_module *blocks = tsh_add_module(tsh_root(ctx), "h", NULL);
    for (int i = 0; i < LAYERS; i++) {
        const char name[2] = {(char)('0' + i), 0};
        tsh_module *block = tsh_add_module(blocks, name, NULL);
        (void)tsh_add_attention(block, "attn", &desc);
        tsh_checkpoint(block, checkpoint);
    }
    return blocks;
}

static tsh_tensor *first_input(tsh_ctx *ctx, int k, void *user) {
    (void)tsh_set_segments((tsh_module *)user, segments_of(ctx, k));
    return input_of(ctx, k);
}

static tsh_tensor *last_loss(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    (void)ctx, (void)k, (void)user;
    return tsh_scale(tsh_sum(tsh_mul(y, y), TSH_ALL, 0), 10);
}

/* The gradients of the mean loss of all micro-batches, each forward followed by its backward. */
static int plain_rank(tsh_ctx *ctx, void *user) {
    tsh_module *blocks = model(ctx, 0);
    for (int k = 0; k < BATCHES; k++) {
        tsh_tensor *y = tsh_forward(blocks, first_input(ctx, k, blocks));
        tsh_backward(ctx, tsh_scale(last_loss(ctx, y, k, NULL), 1.0 / BATCHES));
        tsh_step_end(ctx);
        CHECK_OK();
    }
    tsh_each_param(blocks, params_keep_gradient, user);
    CHECK_OK();
    return 0;
}

typedef struct job {
    const kept_params *want;
    int checkpoint, pipeline;
} job;

/* All forwards, then backward through all of them. */
static int together_rank(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    kept_params *got = (kept_params *)calloc(1, sizeof *got);
    tsh_module *blocks = model(ctx, j->checkpoint);
    tsh_tensor *loss = tsh_zeros(ctx, tsh_shape0());
    int failed;
    for (int k = 0; k < BATCHES; k++) {
        tsh_tensor *x = first_input(ctx, k, blocks);
        loss = tsh_add(loss, last_loss(ctx, tsh_forward(blocks, x), k, NULL));
    }
    CHECK_TRUE(tsh_set_segments(blocks, NULL) == TSH_OK);
    tsh_backward(ctx, tsh_scale(loss, 1.0 / BATCHES));
    tsh_each_param(blocks, params_keep_gradient, got);
    tsh_step_end(ctx);
    CHECK_OK();
    CHECK(tsh_mem_stats(ctx).step_live == 0, "%zu bytes are left", tsh_mem_stats(ctx).step_live);
    failed = params_compare(ctx, j->want, got, 1e-5, -1);
    params_free(got);
    free(got);
    return failed;
}

static int pipeline_rank(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    kept_params *got = (kept_params *)calloc(1, sizeof *got);
    tsh_module *blocks = model(ctx, j->checkpoint);
    const tsh_pipeline_desc desc = {.micro_batches = BATCHES,
                                    .schedule = j->pipeline > 1 ? TSH_PIPELINE_GPIPE
                                                                : TSH_PIPELINE_1F1B,
                                    .input = first_input,
                                    .loss = last_loss,
                                    .user = blocks};
    tsh_pipeline *pipeline = tsh_pipeline_new(blocks, &desc);
    double loss, evaluated;
    int failed;
    CHECK(tsh_pipeline_train(pipeline, &loss) == TSH_OK, "training");
    tsh_each_param(blocks, params_keep_gradient, got);
    tsh_step_end(ctx);
    CHECK_TRUE(tsh_pipeline_evaluate(pipeline, 0, &evaluated) == TSH_OK);
    CHECK(fabs(loss - evaluated) <= 1e-5 * fabs(loss), "evaluated %g, not %g", evaluated, loss);
    failed = params_compare(ctx, j->want, got, 1e-5, -1);
    params_free(got);
    free(got);
    return failed;
}

static void backward_uses_the_segments_of_its_forward(void **state) {
    kept_params *want = (kept_params *)calloc(1, sizeof *want);
    const tsh_desc desc = {.seed = 2};
    (void)state;
    ranks_run_at(RANKS_EACH, 1, &desc, plain_rank, want);
    for (int checkpoint = 0; checkpoint < 2; checkpoint++) {
        job j = {want, checkpoint, 0};
        for (int p = 0; p < COUNT(ranks_degrees); p++)
            ranks_run_with(ranks_degrees[p], &desc, together_rank, &j);
        for (int pp = 2; pp <= 4; pp += 2)
            for (j.pipeline = 1; j.pipeline <= 2; j.pipeline++) {
                const tsh_desc staged = {.pp = pp, .tp = 1, .seed = 2};
                const tsh_desc both = {.pp = 2, .tp = 2, .seed = 2};
                ranks_run_with(pp, &staged, pipeline_rank, &j);
                if (pp == 2) ranks_run_with(4, &both, pipeline_rank, &j);
            }
    }
    params_free(want);
    free(want);
}

static int refused_rank(tsh_ctx *ctx, void *user) {
    tsh_module *blocks = model(ctx, 1);
    tsh_tensor *x = tsh_keep(input_of(ctx, 0));
    tsh_cache *cache;
    tsh_ctx *other = NULL;
    const tsh_desc alone = {.tp = 1};
    (void)user;
    CHECK_TRUE(tsh_open(&alone, &other) == TSH_OK);
    CHECK_TRUE(tsh_set_segments(blocks, segments_of(other, 0)) == TSH_ERR_ARGUMENT);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_set_segments: segments belongs to another ctx");
    tsh_close(other);
    CHECK_TRUE(tsh_set_segments(NULL, NULL) == TSH_ERR_ARGUMENT);
    CHECK_TRUE(tsh_set_segments(blocks, x) == TSH_ERR_SHAPE);
    CHECK_SAYS(TSH_ERR_SHAPE, "tsh_set_segments: segments f32 (2, 40, 16) R; takes i32");
    CHECK_TRUE(tsh_set_segments(blocks, tsh_slice(segments_of(ctx, 0), 1, 0, 30)) == TSH_OK);
    CHECK(!tsh_forward(blocks, x), "shorter segments");
    CHECK_SAYS(TSH_ERR_SHAPE, "segments i32 (2, 30) R for 2 rows of 40 queries");
    tsh_step_end(ctx);
    CHECK(!tsh_forward(blocks, x), "segments of an earlier step");
    CHECK_SAYS(TSH_ERR_STALE, "segments");
    CHECK_TRUE(tsh_set_segments(blocks, segments_of(ctx, 1)) == TSH_OK);
    CHECK(tsh_forward(blocks, x), "replaced");
    tsh_step_end(ctx);
    cache = tsh_cache_new(blocks, B, 99, TSH_DTYPE_DEFAULT);
    tsh_no_grad_begin(ctx);
    CHECK_TRUE(tsh_set_segments(blocks, segments_of(ctx, 1)) == TSH_OK);
    CHECK(!tsh_forward(blocks, x), "a cache");
    CHECK_SAYS(TSH_ERR_STATE, "segments with a cache");
    tsh_cache_truncate(cache, 0);
    CHECK_TRUE(tsh_set_segments(blocks, NULL) == TSH_OK);
    CHECK(tsh_forward(blocks, x), "no segments");
    tsh_no_grad_end(ctx);
    CHECK_OK();
    return 0;
}

static void what_does_not_fit_is_refused(void **state) {
    (void)state;
    ranks_run(1, refused_rank, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(backward_uses_the_segments_of_its_forward),
        cmocka_unit_test(what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
