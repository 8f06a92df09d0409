/* examples/llm/plan.h: what a dry run counts is what a real one takes, to the byte, at several
 * shapes and degrees; for training and generation. tsh_dry_run itself: it computes nothing, and a
 * model that is larger than any memory can be planned. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../../examples/llm/plan.h"

static const char llama[] = "examples/llm/tiny/llama", bert[] = "examples/llm/tiny/bert";

typedef struct task {
    llm_plan plan;
    llm_config config;
    tsh_mem mem[4]; /* of the first rank of each stage */
} task;

static tsh_mem planned[4]; /* of the first rank of each stage */

static void keep_stage(FILE *file, const llm_plan *p) {
    (void)file;
    planned[p->stage] = p->mem;
}

/* What llm_plan_rank does, without the dry run. */
static int real(tsh_ctx *ctx, void *user) {
    task *t = (task *)user;
    llm_plan own = t->plan; /* each rank has one */
    llm_net *m = (llm_net *)calloc(1, sizeof *m);
    int32_t *ids = (int32_t *)calloc((size_t)(own.rows * own.length), sizeof *ids);
    CHECK_TRUE(m && ids);
    CHECK_TRUE(llm_model_make(m, ctx, own.config, own.family, own.rows, own.length, own.weights) ==
               TSH_OK);
    (own.train ? llm_plan_training : llm_plan_generation)(&own, m, ids);
    if (tsh_tp(ctx)->rank == 0 && tsh_dp(ctx)->rank == 0)
        t->mem[tsh_pp(ctx)->rank] = tsh_mem_stats(ctx);
    free(ids);
    free(m);
    CHECK_OK();
    return 0;
}

/* The plan and the real run have the same peaks. */
static void agree(const char *folder, llm_plan plan) {
    static task t;
    memset(&t, 0, sizeof t);
    t.plan = plan;
    if (!llm_config_read(&t.config, folder, &t.plan.family)) fail_msg("%s", t.config.error);
    if (plan.weights == TSH_Q8_0) { /* rows of whole blocks */
        t.config.width = 64;
        t.config.head_size = 16;
    }
    if (plan.pp > 1) t.config.layers = 2 * plan.pp - 1; /* unequal stages */
    if (!llm_plan_each(&t.plan, &t.config, t.plan.family, keep_stage, NULL))
        fail_msg("%s", t.plan.error);
    const tsh_desc desc = {.tp = plan.tp > 1 ? plan.tp : 1,
                           .pp = plan.pp,
                           .dtype = plan.dtype ? plan.dtype : TSH_F32};
    ranks_run_with(desc.tp * (plan.dp > 1 ? plan.dp : 1) * (plan.pp > 1 ? plan.pp : 1), &desc, real,
                   &t);
    for (int s = 0; s < (plan.pp > 1 ? plan.pp : 1); s++) {
        for (int k = 0; k < TSH_MEM_KINDS; k++)
            if (t.mem[s].peak[k] != planned[s].peak[k])
                fail_msg("%s: tp %d, stage %d of %d, dp %d, train %d, lora %d, kind %d: planned "
                         "%zu, taken %zu",
                         folder, plan.tp, s, plan.pp, plan.dp, plan.train, plan.lora, k,
                         planned[s].peak[k], t.mem[s].peak[k]);
        assert_int_equal(t.mem[s].total_peak, planned[s].total_peak);
    }
    llm_config_free(&t.config);
}

static void training_takes_what_is_planned(void **state) {
    (void)state;
    for (int tp = 1; tp <= 3; tp++)
        for (int lora = 0; lora <= 4; lora += 4)
            for (int recompute = 0; recompute <= 1; recompute++) {
                llm_plan p = {.train = 1, .tp = tp, .lora = lora, .recompute = recompute,
                              .rows = 3, .length = 24};
                agree(llama, p);
                p.dtype = TSH_BF16;
                agree(llama, p);
            }
    for (int zero = 0; zero <= 1; zero++) {
        const llm_plan p = {.train = 1, .tp = 2, .dp = 2, .zero = zero, .rows = 2, .length = 40};
        agree(llama, p);
    }
    const llm_plan q = {.train = 1, .lora = 2, .rows = 2, .length = 16, .weights = TSH_Q8_0};
    agree(llama, q);
}

static void stages_take_what_is_planned(void **state) {
    (void)state;
    for (int pp = 2; pp <= 3; pp++)
        for (int lora = 0; lora <= 4; lora += 4) {
            llm_plan p = {.train = 1, .pp = pp, .lora = lora, .rows = 2, .length = 24,
                          .accumulate = 4};
            agree(llama, p);
            p.recompute = 1;
            agree(llama, p);
        }
    llm_plan p = {.train = 1, .tp = 2, .pp = 2, .dp = 2, .zero = 1, .rows = 2, .length = 24};
    agree(llama, p);
    p.dtype = TSH_BF16;
    agree(llama, p);
}

static void generation_takes_what_is_planned(void **state) {
    (void)state;
    for (int tp = 1; tp <= 3; tp++) {
        llm_plan p = {.tp = tp, .rows = 2, .length = 150};
        agree(llama, p);
        p.dtype = TSH_BF16;
        agree(llama, p);
        p.weights = TSH_Q8_0;
        agree(llama, p);
    }
    const llm_plan vectors = {.tp = 2, .rows = 1, .length = 20};
    agree(bert, vectors);
}

/* Trains a layer whose weight has more bytes than a machine has memory: a dry run writes none. */
static int endless(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc desc = {.in = 1 << 18, .out = 1 << 18};
    tsh_tensor *y;
    (void)user;
    tsh_dry_run(ctx, 1);
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "layer", &desc);
    y = tsh_forward(layer, tsh_zeros(ctx, tsh_shape2(4, 1 << 18)));
    CHECK_TRUE(y && tsh_size(y, 1) == 1 << 18);
    CHECK_TRUE(tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS] > (size_t)1 << 38);
    CHECK_TRUE(tsh_forward(layer, y) != NULL);
    CHECK_TRUE(tsh_forward(layer, tsh_zeros(ctx, tsh_shape2(4, 5))) == NULL);
    CHECK_SAYS(TSH_ERR_SHAPE, "5 features");
    return 0;
}

/* An allocator that gives a page in place of more than 64 GiB. */
static void *nowhere(void *ptr, size_t old_size, size_t new_size, size_t align, void *user) {
    const size_t large = (size_t)1 << 36;
    static char page[4096];
    void *block = NULL;
    (void)user;
    if (new_size > large) return page + (align - (uintptr_t)page % align) % align;
    if (new_size > 0 && posix_memalign(&block, align, new_size) != 0) return NULL;
    if (block && ptr) memcpy(block, ptr, old_size < new_size ? old_size : new_size);
    if (old_size <= large) free(ptr);
    return block;
}

static void dry_runs_write_nothing(void **state) {
    tsh_desc desc;
    (void)state;
    memset(&desc, 0, sizeof desc);
    desc.allocator.allocate = nowhere;
    ranks_run_with(1, &desc, endless, NULL);
}

static int on_and_off(tsh_ctx *ctx, void *user) {
    const float in[3] = {1, 2, 3};
    float out[3];
    (void)user;
    tsh_dry_run(ctx, 1);
    tsh_dry_run(ctx, 0);
    tsh_tensor *x = tsh_from(ctx, in, tsh_shape1(3), TSH_F32);
    CHECK_TRUE(tsh_read(ctx, tsh_add(x, x), TSH_LOCAL, out, sizeof out) == TSH_OK);
    CHECK_TRUE(out[0] == 2 && out[2] == 6);
    tsh_dry_run(NULL, 1);
    return 0;
}

static void dry_runs_end(void **state) {
    (void)state;
    ranks_run(1, on_and_off, NULL);
}

static void the_table_is_printed(void **state) {
    static llm_config config;
    llm_plan p = {.train = 1, .rows = 2, .length = 16, .tp = 2};
    const llm_family *family;
    char text[4096] = "";
    FILE *file = tmpfile();
    (void)state;
    assert_true(llm_config_read(&config, llama, &family));
    assert_true(llm_plan_run(&p, &config, family));
    llm_plan_print(file, &p);
    rewind(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    (void)fclose(file);
    assert_non_null(strstr(text, "moments"));
    assert_non_null(strstr(text, "--lora 8 --recompute"));
    llm_config_free(&config);
    assert_true(llm_plan_available() != 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(dry_runs_end),
                                       cmocka_unit_test(dry_runs_write_nothing),
                                       cmocka_unit_test(training_takes_what_is_planned),
                                       cmocka_unit_test(stages_take_what_is_planned),
                                       cmocka_unit_test(generation_takes_what_is_planned),
                                       cmocka_unit_test(the_table_is_printed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
