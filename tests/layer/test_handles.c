/* Handles are not reused while something refers to them: a tape, a view, a checkpoint, a pipeline,
 * a bucket of gradients, a layer. Whatever the program frees in the middle of a step, no other
 * tensor gets its gradient or takes its place. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"

/* More handles than may be free before they are reused. */
enum { MANY = 300, WIDTH = 4 };

/* New leaves of shape (4, 4), after so many others were freed that each may have the handle of a
 * tensor that was freed before. */
typedef struct crowd {
    tsh_tensor *leaf[2 * MANY];
} crowd;

static void arrive(crowd *all, tsh_ctx *ctx) {
    for (int i = 0; i < MANY; i++) all->leaf[i] = tsh_zeros(ctx, tsh_shape1(1));
    for (int i = 0; i < MANY; i++) all->leaf[i] = tsh_keep(all->leaf[i]);
    for (int i = 0; i < MANY; i++) tsh_tensor_free(all->leaf[i]);
    for (int i = 0; i < 2 * MANY; i++)
        all->leaf[i] = tsh_requires_grad(
            tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(WIDTH, WIDTH), tsh_replicated()), 1);
}

/* Returns how many of them have a gradient, and frees them. */
static int touched(crowd *all) {
    int n = 0;
    for (int i = 0; i < 2 * MANY; i++) {
        n += tsh_grad(all->leaf[i]) != NULL;
        tsh_tensor_free(all->leaf[i]);
    }
    return n;
}

/* A leaf of ones, (4, 4). */
static tsh_tensor *ones(tsh_ctx *ctx) {
    return tsh_requires_grad(tsh_keep(tsh_ones(ctx, tsh_shape2(WIDTH, WIDTH))), 1);
}

static tsh_tensor *mean(tsh_tensor *x) {
    return tsh_mean(x, TSH_ALL, 0);
}

/* ------------------------------------------------------------- tapes and views */

static void a_leaf_freed_before_backward_leaves_its_handle(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *w = ones(ctx), *x = ones(ctx), *loss = mean(tsh_linear(x, w, NULL));
    crowd all;
    (void)state;
    tsh_tensor_free(w);
    arrive(&all, ctx);
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    EXPECT_TEXT(tsh_slice(tsh_grad(x), 0, 0, 1), "(1, 4) R: 0.25 0.25 0.25 0.25");
    assert_int_equal(touched(&all), 0);
    unit_close(ctx);
}

/* The view has values of its own to go on with, and no gradient flows to what it was a view of. */
static void a_view_outlives_its_base(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *w = ones(ctx), *x = ones(ctx), *view = tsh_transpose(w, 0, 1);
    crowd all;
    (void)state;
    tsh_tensor_free(w);
    arrive(&all, ctx);
    assert_int_equal(tsh_backward(ctx, mean(tsh_mul(view, x))), TSH_OK);
    assert_null(tsh_grad(view));
    assert_non_null(tsh_grad(x));
    assert_int_equal(touched(&all), 0);
    unit_close(ctx);
}

/* Views that a tape refers to: their bases are referred to as well. */
static void a_view_on_the_tape_keeps_its_base(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *w = ones(ctx), *x = ones(ctx);
    tsh_tensor *loss = mean(tsh_mul(tsh_transpose(w, 0, 1), x));
    crowd all;
    (void)state;
    tsh_tensor_free(w);
    arrive(&all, ctx);
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    assert_non_null(tsh_grad(x));
    assert_int_equal(touched(&all), 0);
    unit_close(ctx);
}

/* A program that frees leaves in the middle of its steps needs no more memory with every step. */
static void handles_are_reused_in_the_end(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = ones(ctx);
    size_t before = 0;
    (void)state;
    for (int step = 0; step < 2000; step++) {
        tsh_tensor *w = ones(ctx), *loss = mean(tsh_mul(tsh_transpose(w, 0, 1), x));
        tsh_tensor_free(w);
        if (step % 2) assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
        tsh_zero_grad(x);
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
        if (step == 1000) before = tsh_mem_stats(ctx).now[TSH_MEM_BOOKS];
    }
    assert_int_equal(tsh_mem_stats(ctx).now[TSH_MEM_BOOKS], before);
    unit_close(ctx);
}

/* ----------------------------------------------------------------- checkpoints */

static tsh_module *linear(tsh_module *parent, const char *name) {
    const tsh_linear_desc desc = {.in = WIDTH, .out = WIDTH};
    return tsh_add_linear(parent, name, &desc);
}

static void an_input_of_a_checkpoint_leaves_its_handle(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *m = linear(tsh_root(ctx), "m");
    tsh_tensor *x = ones(ctx), *loss;
    crowd all;
    (void)state;
    tsh_checkpoint(m, 1);
    loss = mean(tsh_forward(m, x));
    tsh_tensor_free(x);
    arrive(&all, ctx);
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    assert_non_null(tsh_grad(tsh_param(m, "weight")));
    assert_int_equal(touched(&all), 0);
    unit_close(ctx);
}

/* Backward computes the block again in the mode in which forward ran it. */
static void a_checkpoint_keeps_its_mode(void **state) {
    uint64_t hash[2];
    (void)state;
    for (int i = 0; i < 2; i++) {
        tsh_ctx *ctx = unit_open(NULL);
        tsh_module *block = tsh_add_module(tsh_root(ctx), "block", NULL);
        tsh_tensor *loss, *x = ones(ctx);
        (void)linear(block, "m");
        (void)tsh_add_dropout(block, "drop", 0.5);
        tsh_checkpoint(block, 1);
        loss = mean(tsh_forward(block, x));
        tsh_train(block, !i); /* in the second ctx: evaluation begins before backward */
        assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
        assert_int_equal(tsh_training(block), !i);
        hash[i] = tsh_hash(ctx, tsh_grad(x));
        unit_close(ctx);
    }
    assert_true(hash[0] == hash[1]);
}

/* What backward will read again must not be overwritten: frozen parameters neither. */
static void a_checkpoint_keeps_its_frozen_parameters(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *m = linear(tsh_root(ctx), "m");
    tsh_tensor *w = tsh_param(m, "weight"), *loss;
    tsh_real zeros[WIDTH * WIDTH] = {0};
    (void)state;
    (void)tsh_requires_grad(w, 0);
    tsh_checkpoint(m, 1);
    loss = mean(tsh_forward(m, ones(ctx)));
    assert_int_not_equal(tsh_write(ctx, w, TSH_GLOBAL, zeros, sizeof zeros), TSH_OK);
    EXPECT(TSH_ERR_STATE, "tsh_write: ops are recorded that used the tensor's values");
    assert_int_not_equal(tsh_to(m, TSH_F16), TSH_OK);
    EXPECT(TSH_ERR_STATE, "tsh_to: ops are recorded that use \"m.weight\"");
    assert_int_equal(tsh_backward(ctx, loss), TSH_OK);
    assert_int_equal(tsh_write(ctx, w, TSH_GLOBAL, zeros, sizeof zeros), TSH_OK);
    unit_close(ctx);
}

/* --------------------------------------------------- functions of the program's */

/* What the program's own function does while the library goes through the tape. */
typedef enum deed { END_STEP, BACKWARD, FREE_LEAF, DEEDS } deed;
typedef struct act {
    deed what;
    tsh_tensor *leaf, *loss;
} act;

static void do_act(tsh_ctx *ctx, const act *a) {
    if (a->what == END_STEP) (void)tsh_step_end(ctx);
    if (a->what == BACKWARD) (void)tsh_backward(ctx, a->loss);
    if (a->what == FREE_LEAF) tsh_tensor_free(a->leaf);
}

static void act_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    (void)user, (void)n;
    memcpy(y, tsh_data(tsh_ctx_of(in[0]), in[0]), WIDTH * WIDTH * sizeof *y);
}

static void act_backward(tsh_tensor *const *in, int n, const void *const *out,
                         const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    const tsh_real *dy = grad_out[0];
    (void)n, (void)out;
    do_act(tsh_ctx_of(in[0]), (const act *)user);
    for (int i = 0; i < WIDTH * WIDTH && grad_in[0]; i++) grad_in[0][i] += dy[i];
}

static tsh_tensor *act_op(tsh_tensor *x, act *a) {
    const tsh_custom_op_desc desc = {.name = "act", .out[0].shape = {2, {WIDTH, WIDTH}}, .user = a,
                                  .forward = act_forward, .backward = act_backward};
    return tsh_custom_op(tsh_ctx_of(x), &x, 1, NULL, &desc);
}

static void a_backward_does_not_end_its_own_tape(void **state) {
    static const char *const says[] = {"tsh_step_end: is called while a backward",
                                       "tsh_backward: is called while a backward"};
    (void)state;
    for (int i = END_STEP; i <= BACKWARD; i++) {
        tsh_ctx *ctx = unit_open(NULL);
        act a = {(deed)i, NULL, NULL};
        a.loss = mean(tsh_mul(act_op(tsh_neg(ones(ctx)), &a), ones(ctx)));
        assert_int_not_equal(tsh_backward(ctx, a.loss), TSH_OK);
        EXPECT(TSH_ERR_STATE, says[i]);
        assert_int_equal(tsh_step_end(ctx), TSH_OK);
        unit_close(ctx);
    }
}

/* A forward that acts, and returns a tensor that it has made afterwards. */
static tsh_tensor *acting(tsh_module *m, tsh_tensor **in, int n, void *user) {
    (void)m, (void)n;
    do_act(tsh_ctx_of(in[0]), (const act *)user);
    return tsh_zeros(tsh_ctx_of(in[0]), tsh_shape2(WIDTH, WIDTH));
}

static void a_checkpoint_does_not_end_its_own_tape(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    act a = {END_STEP, NULL, NULL};
    const tsh_module_desc desc = {acting, &a};
    tsh_module *m = tsh_add_module(tsh_root(ctx), "m", &desc);
    (void)state;
    tsh_checkpoint(m, 1);
    assert_null(tsh_forward(m, ones(ctx)));
    EXPECT(TSH_ERR_STATE, "m: tsh_step_end: is called while a backward or the forward of a check");
    unit_close(ctx);
}

/* x's gradient is complete and in a bucket, to be summed over the replicas, when it is freed. */
static int frees_in_flight(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = tsh_average_grad(ones(ctx), 1), *y = ones(ctx), *first, *loss;
    act a = {FREE_LEAF, NULL, NULL};
    (void)user;
    a.leaf = x;
    first = act_op(tsh_neg(y), &a); /* the oldest node: its backward is the last */
    loss = mean(tsh_add(first, tsh_neg(x)));
    (void)tsh_barrier(tsh_world(ctx)); /* all are here before one fails */
    CHECK(tsh_backward(ctx, loss) != TSH_OK, "backward");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_STATE, "code");
    CHECK(strstr(tsh_last_error(ctx)->message, "a leaf was freed whose gradient is summed"),
          "sentence");
    return 0;
}

static void a_leaf_in_a_bucket_is_not_lost(void **state) {
    static const size_t sizes[] = {4, 1 << 20}; /* a bucket of its own, or with others */
    (void)state;
    for (int i = 0; i < 4; i++) {
        const tsh_desc desc = {.tp = 1, .bucket_bytes = sizes[i / 2], .no_overlap = i % 2};
        ranks_run_with(2, &desc, frees_in_flight, NULL);
    }
}

/* -------------------------------------------------------- pipelines and layers */

/* The input of each micro-batch is freed when the next one is asked for. */
typedef struct feed {
    tsh_tensor *x;
    crowd all;
    int retains;
} feed;

static tsh_tensor *fed(tsh_ctx *ctx, int k, void *user) {
    feed *f = (feed *)user;
    (void)k;
    tsh_tensor_free(f->x);
    if (k == 1) arrive(&f->all, ctx);
    return f->x = ones(ctx);
}

static tsh_tensor *loss_of(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    (void)ctx, (void)k, (void)user;
    return mean(y);
}

static void a_pipeline_keeps_the_handles_of_its_micro_batches(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    feed f = {NULL, {{NULL}}, 0};
    const tsh_pipeline_desc desc = {.micro_batches = 3, .schedule = TSH_PIPELINE_GPIPE,
                                    .input = fed, .loss = loss_of, .user = &f};
    double loss;
    (void)state;
    (void)linear(h, "0");
    assert_int_equal(tsh_pipeline_train(tsh_pipeline_new(h, &desc), &loss), TSH_OK);
    assert_int_equal(touched(&f.all), 0);
    unit_close(ctx);
}

/* A step that ends while the output of a micro-batch waits for its backward. */
static tsh_tensor *ending(tsh_ctx *ctx, int k, void *user) {
    (void)k, (void)user;
    (void)tsh_step_end(ctx);
    return tsh_ones(ctx, tsh_shape2(WIDTH, WIDTH));
}

static tsh_tensor *retained(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    (void)ctx, (void)k, (void)user;
    return tsh_retain_grad(mean(y));
}

static void a_pipeline_misses_no_output_in_silence(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    const tsh_pipeline_desc desc = {.micro_batches = 2, .schedule = TSH_PIPELINE_GPIPE,
                                    .input = ending, .loss = retained};
    (void)state;
    (void)linear(h, "0");
    assert_int_not_equal(tsh_pipeline_train(tsh_pipeline_new(h, &desc), NULL), TSH_OK);
    EXPECT(TSH_ERR_STATE, "the output of micro-batch 0 was retained, and a callback has ended");
    unit_close(ctx);
}

static tsh_tensor *text(tsh_ctx *ctx) {
    return tsh_ones(ctx, tsh_shape3(1, WIDTH, WIDTH));
}

static void a_layer_keeps_the_handle_of_its_mask(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_attention_layer_desc desc = {.dim = WIDTH, .heads = 1};
    tsh_module *attention;
    crowd all;
    (void)state;
    desc.attention.mask = tsh_keep(tsh_ones(ctx, tsh_shape2(WIDTH, WIDTH)));
    attention = tsh_add_attention(tsh_root(ctx), "attention", &desc);
    assert_non_null(tsh_forward(attention, text(ctx)));
    tsh_tensor_free(desc.attention.mask);
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    arrive(&all, ctx);
    assert_null(tsh_forward(attention, text(ctx)));
    EXPECT(TSH_ERR_STALE, "attention: tsh_attention: the values of");
    assert_int_equal(touched(&all), 0);
    unit_close(ctx);
}

/* tsh_tie replaces a parameter in every layer that uses it, and its handle is free then. */
static void a_layer_uses_the_parameter_that_it_is_tied_to(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    const tsh_attention_layer_desc desc = {.dim = WIDTH, .heads = 2, .sinks = 1};
    tsh_module *a = tsh_add_attention(tsh_root(ctx), "a", &desc);
    tsh_module *b = tsh_add_attention(tsh_root(ctx), "b", &desc);
    crowd all;
    (void)state;
    assert_int_equal(tsh_tie(b, "sinks", tsh_param(a, "sinks")), TSH_OK);
    arrive(&all, ctx);
    assert_int_equal(tsh_backward(ctx, mean(tsh_forward(b, text(ctx)))), TSH_OK);
    assert_non_null(tsh_grad(tsh_param(a, "sinks")));
    assert_int_equal(touched(&all), 0);
    unit_close(ctx);
}

/* A ctx is closed while it keeps weights that others stand in for: those of an average
 * (tsh_ema), and those that an adapter is merged into. */
static void closing_releases_weights_that_are_put_aside(void **state) {
    static const tsh_dtype dtypes[] = {TSH_F32, TSH_BF16};
    const tsh_linear_desc linear = {.in = WIDTH, .out = WIDTH};
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.1};
    const tsh_lora_desc lora = {.rank = 2};
    (void)state;
    for (int i = 0; i < 2; i++) {
        unit_memory memory;
        tsh_ctx *ctx = unit_open_memory(&memory);
        tsh_module *average = tsh_add_linear(tsh_root(ctx), "average", &linear);
        tsh_module *merged = tsh_add_linear(tsh_root(ctx), "merged", &linear);
        tsh_optim *optim;
        tsh_ema *ema;
        tsh_tensor *x;
        assert_int_equal(tsh_to(tsh_root(ctx), dtypes[i]), TSH_OK);
        optim = tsh_optim_new(tsh_root(ctx), &adamw); /* bf16 weights get exact ones */
        x = tsh_cast(tsh_ones(ctx, tsh_shape2(WIDTH, WIDTH)), dtypes[i]);
        x = tsh_forward(merged, tsh_forward(average, x));
        assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_cast(x, TSH_REAL), TSH_ALL, 0)), TSH_OK);
        assert_int_equal(tsh_optim_step(optim), TSH_OK);
        (void)tsh_step_end(ctx);
        assert_int_equal(tsh_lora(merged, NULL, &lora), TSH_OK);
        assert_int_equal(tsh_lora_merge(merged), TSH_OK);
        ema = tsh_ema_new(average, 0.5);
        assert_int_equal(tsh_ema_update(ema), TSH_OK);
        assert_int_equal(tsh_ema_swap(ema), TSH_OK);
        tsh_close(ctx);
        assert_int_equal(memory.blocks, 0);
        assert_int_equal(memory.bytes, 0);
        assert_int_equal(memory.broken, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_leaf_freed_before_backward_leaves_its_handle),
        cmocka_unit_test(closing_releases_weights_that_are_put_aside),
        cmocka_unit_test(a_view_outlives_its_base),
        cmocka_unit_test(a_view_on_the_tape_keeps_its_base),
        cmocka_unit_test(handles_are_reused_in_the_end),
        cmocka_unit_test(an_input_of_a_checkpoint_leaves_its_handle),
        cmocka_unit_test(a_checkpoint_keeps_its_mode),
        cmocka_unit_test(a_checkpoint_keeps_its_frozen_parameters),
        cmocka_unit_test(a_backward_does_not_end_its_own_tape),
        cmocka_unit_test(a_checkpoint_does_not_end_its_own_tape),
        cmocka_unit_test(a_leaf_in_a_bucket_is_not_lost),
        cmocka_unit_test(a_pipeline_keeps_the_handles_of_its_micro_batches),
        cmocka_unit_test(a_pipeline_misses_no_output_in_silence),
        cmocka_unit_test(a_layer_keeps_the_handle_of_its_mask),
        cmocka_unit_test(a_layer_uses_the_parameter_that_it_is_tied_to),
    };
    return cmocka_run_group_tests_name("layer/handles", tests, NULL, NULL);
}
