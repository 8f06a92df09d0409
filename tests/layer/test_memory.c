/* Memory: training in steady state never calls the allocator, tsh_mem_stats counts what the
 * allocator gave, and closing a ctx releases all of it. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/small_gpt.h"
#include "../support/counting.h"

static counting memory;

static size_t sum_of_kinds(const tsh_mem *mem) {
    size_t sum = 0;
    int kind;
    for (kind = 0; kind < TSH_MEM_KINDS; kind++) sum += mem->now[kind];
    return sum;
}

/* The books against the allocator, on this rank. */
static int check_books(tsh_ctx *ctx) {
    const tsh_mem mem = tsh_mem_stats(ctx);
    const counting_thread seen = counting_now(&memory);
    int kind;
    CHECK(sum_of_kinds(&mem) == mem.total, "kinds add up to %zu, total is %zu", sum_of_kinds(&mem),
          mem.total);
    CHECK(mem.total == seen.live, "total is %zu, the allocator gave %zu", mem.total, seen.live);
    CHECK(mem.total_peak == seen.peak, "peak is %zu, it was %zu", mem.total_peak, seen.peak);
    CHECK(mem.calls == seen.calls, "%lu calls, not %lu", (unsigned long)mem.calls,
          (unsigned long)seen.calls);
    for (kind = 0; kind < TSH_MEM_KINDS; kind++)
        CHECK(mem.peak[kind] >= mem.now[kind], "peak of kind %d", kind);
    CHECK(mem.step_live <= mem.now[TSH_MEM_STEP], "live step memory is in the pool");
    return 0;
}

static void expect_clean(void) {
    if (memory.broken) fail_msg("%s", memory.broken);
    assert_int_equal(memory.live, 0);
    assert_int_equal(memory.blocks, 0);
}

static void run_counted(int ranks, int (*fn)(tsh_ctx *, void *), void *user) {
    tsh_desc desc = {.tp = 0};
    counting_begin(&memory, &desc);
    ranks_run_with(ranks, &desc, fn, user);
    expect_clean();
}

/* --------------------------------------------------------------- the steady state */

typedef struct trainer {
    tsh_module *gpt;
    tsh_optim *optim;
    tsh_tensor *ids, *targets;
} trainer;

/* checkpoint: the first block is computed again. */
static int make_trainer(tsh_ctx *ctx, trainer *t, int checkpoint) {
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .clip_norm = 1};
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    t->gpt = gpt_add(ctx);
    tsh_checkpoint(tsh_find(t->gpt, "h.0"), checkpoint);
    CHECK(tsh_parallelize(t->gpt, gpt_plan, GPT_RULES) == TSH_OK, "plan");
    t->optim = tsh_optim_new(t->gpt, &adamw);
    t->ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    t->targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    CHECK_OK();
    return 0;
}

/* A loop without gradients, in scopes. */
static int evaluate(tsh_ctx *ctx, trainer *t) {
    int i;
    tsh_train(t->gpt, 0);
    tsh_no_grad_begin(ctx);
    for (i = 0; i < 3; i++) {
        tsh_scope_begin(ctx);
        gpt_load(ctx, t->ids, t->targets, i);
        CHECK(tsh_item(ctx, tsh_cross_entropy(gpt_logits(t->gpt, t->ids), t->targets, NULL)) > 0,
              "loss");
        tsh_scope_end(ctx);
    }
    tsh_no_grad_end(ctx);
    tsh_train(t->gpt, 1);
    return 0;
}

static int steady(tsh_ctx *ctx, void *user) {
    enum { WARM_UP = 3, STEPS = 12 };
    uint64_t before = 0;
    size_t peak = 0;
    trainer t;
    int step;
    if (make_trainer(ctx, &t, *(int *)user)) return 1;
    for (step = 0; step < STEPS; step++) {
        if (step == WARM_UP) before = counting_now(&memory).calls;
        if (step == WARM_UP) peak = tsh_mem_stats(ctx).step_live_peak;
        (void)gpt_step(ctx, t.optim, t.ids, t.targets, step);
        if (evaluate(ctx, &t)) return 1;
        CHECK_OK();
        CHECK(tsh_mem_stats(ctx).step_live == 0, "step %d leaves %zu bytes of step memory", step,
              tsh_mem_stats(ctx).step_live);
    }
    CHECK(counting_now(&memory).calls == before, "%d calls of the allocator in %d steps",
          (int)(counting_now(&memory).calls - before), STEPS - WARM_UP);
    CHECK(tsh_mem_stats(ctx).calls == before, "tsh_mem_stats counts them too");
    CHECK(tsh_mem_stats(ctx).step_live_peak == peak, "a step needs what the one before needed");
    return check_books(ctx);
}

static void steady_training_never_calls_the_allocator(void **state) {
    int i, checkpoint;
    (void)state;
    for (checkpoint = 0; checkpoint < 2; checkpoint++)
        for (i = 0; i < COUNT(ranks_degrees); i++)
            run_counted(ranks_degrees[i], steady, &checkpoint);
}

/* ------------------------------------------------------------------ books by kind */

static void add_bytes(const char *path, tsh_tensor *param, void *user) {
    (void)path;
    *(size_t *)user += (size_t)tsh_local_numel(param) * sizeof(tsh_real);
}

/* Bytes of a kind: what the values need, and at most 128 more for each block. */
static int check_kind(tsh_ctx *ctx, tsh_mem_kind kind, size_t need, size_t blocks) {
    size_t now = tsh_mem_stats(ctx).now[kind];
    CHECK(now >= need && now <= need + 128 * blocks, "kind %d holds %zu bytes for %zu", (int)kind,
          now, need);
    return 0;
}

static int by_kind(tsh_ctx *ctx, void *user) {
    enum { PARAMS = 3 + 12 * GPT_LAYERS + 1 };
    const size_t batch = GPT_BATCH * GPT_CONTEXT * sizeof(int32_t);
    size_t params = 0;
    tsh_tensor *extra;
    trainer t;
    (void)user;
    if (check_books(ctx) || make_trainer(ctx, &t, 0)) return 1;
    tsh_each_param(t.gpt, add_bytes, &params);
    if (check_kind(ctx, TSH_MEM_PARAMETERS, 0, 0)) return 1; /* none before the first use */
    CHECK(tsh_materialize(t.gpt) == TSH_OK, "values");
    if (check_kind(ctx, TSH_MEM_PARAMETERS, params, PARAMS) ||
        check_kind(ctx, TSH_MEM_GRADIENTS, 0, 0) || check_kind(ctx, TSH_MEM_OPTIMISER, 0, 0) ||
        check_kind(ctx, TSH_MEM_TENSORS, 2 * batch, 2) || check_books(ctx))
        return 1;
    (void)gpt_step(ctx, t.optim, t.ids, t.targets, 0);
    CHECK_OK();
    /* norms keep a second accumulator only where their gradients are partial: here they are not */
    if (check_kind(ctx, TSH_MEM_PARAMETERS, params, PARAMS) ||
        check_kind(ctx, TSH_MEM_GRADIENTS, params, PARAMS) ||
        check_kind(ctx, TSH_MEM_OPTIMISER, 2 * params, 2 * PARAMS) || check_books(ctx))
        return 1;
    extra = tsh_tensor_new(ctx, TSH_F32, tsh_shape2(30, 40), tsh_replicated());
    if (check_kind(ctx, TSH_MEM_TENSORS, 2 * batch + 4800, 3)) return 1;
    tsh_tensor_free(extra);
    if (check_kind(ctx, TSH_MEM_TENSORS, 2 * batch, 2) || check_books(ctx)) return 1;
    CHECK(tsh_mem_stats(ctx).peak[TSH_MEM_TENSORS] >= 2 * batch + 4800, "the peak remembers");
    CHECK(tsh_mem_stats(NULL).total == 0, "no ctx, no memory");
    return 0;
}

static void books_by_kind_are_what_the_allocator_saw(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) run_counted(ranks_degrees[i], by_kind, NULL);
}

/* --------------------------------------------------------------------- no leaks */

/* Closing a ctx at a bad moment: with a tape, inside scopes, with pending gradients, after an
 * error. */
typedef enum moment { WITH_TAPE, IN_SCOPE, PENDING, AFTER_ERROR, MOMENTS } moment;

static int leave(tsh_ctx *ctx, void *user) {
    const tsh_backward_desc defer = {.defer = 1};
    moment when = *(const moment *)user;
    tsh_tensor *loss;
    trainer t;
    if (make_trainer(ctx, &t, 0)) return 1;
    if (when == IN_SCOPE) tsh_no_grad_begin(ctx);
    if (when == IN_SCOPE) tsh_scope_begin(ctx);
    gpt_load(ctx, t.ids, t.targets, 0);
    loss = tsh_cross_entropy(gpt_logits(t.gpt, t.ids), t.targets, NULL);
    CHECK(loss, "loss");
    if (when == PENDING) CHECK(tsh_backward_with(ctx, loss, &defer) == TSH_OK, "backward");
    (void)tsh_barrier(tsh_world(ctx));
    if (when == AFTER_ERROR && tsh_world(ctx)->rank == 0)
        CHECK(!tsh_matmul(loss, loss), "a scalar is no matrix");
    return 0;
}

static void closing_at_any_moment_leaks_nothing(void **state) {
    int when, i;
    (void)state;
    for (when = 0; when < MOMENTS; when++)
        for (i = 0; i < COUNT(ranks_degrees); i++) {
            moment m = (moment)when;
            run_counted(ranks_degrees[i], leave, &m);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steady_training_never_calls_the_allocator),
        cmocka_unit_test(books_by_kind_are_what_the_allocator_saw),
        cmocka_unit_test(closing_at_any_moment_leaks_nothing),
    };
    return cmocka_run_group_tests_name("layer/memory", tests, NULL, NULL);
}
