/* A profile: its rows add up to the step, its bytes to tsh_mem_stats, its work to the products'. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/small_gpt.h"

enum { STEPS = 40, LINES = 96, LINE = 256 };

/* What the logger of rank 0 got. */
typedef struct page {
    char line[LINES][LINE];
    int lines;
} page;

static page told;

static void hear(const char *message, void *user) {
    page *p = (page *)user;
    if (p->lines < LINES) (void)snprintf(p->line[p->lines++], LINE, "%s", message);
}

/* A row: its name, calls of an op, times by phase, then an op's rate or a module's bytes. */
typedef struct row {
    char name[LINE];
    double calls, ms[3], share, number[4];
} row;

/* Reads a row of the table of ops, or of modules; 0: the line is none. */
static int read_row(const char *line, int module, row *r) {
    char numbers[LINE];
    memset(r, 0, sizeof *r);
    if (strlen(line) < 40) return 0;
    (void)snprintf(r->name, sizeof r->name, "%.30s", line);
    for (size_t n = strlen(r->name); n && r->name[n - 1] == ' ';) r->name[--n] = '\0';
    (void)snprintf(numbers, sizeof numbers, "%s", line + 30);
    if (module)
        return sscanf(numbers, "%lf%lf%lf%lf %% %lf%lf%lf%lf", &r->ms[0], &r->ms[1], &r->ms[2],
                      &r->share, &r->number[0], &r->number[1], &r->number[2], &r->number[3]) == 8;
    if (sscanf(numbers, "%lf%lf%lf%lf%lf %% %lf", &r->calls, &r->ms[0], &r->ms[1], &r->ms[2],
               &r->share, &r->number[0]) >= 5)
        return 1;
    return sscanf(numbers, "%lf%lf%lf%lf %%", &r->ms[0], &r->ms[1], &r->ms[2], &r->share) == 4;
}

/* The row of this name; of the ops, or of the modules. */
static row find_row(const page *p, int module, const char *name) {
    row r;
    int i, in_modules = 0;
    for (i = 0; i < p->lines; i++) {
        in_modules |= strncmp(p->line[i], "module ", 7) == 0;
        if (in_modules == module && read_row(p->line[i], module, &r) && strcmp(r.name, name) == 0)
            return r;
    }
    for (i = 0; i < p->lines; i++) print_message("%s\n", p->line[i]);
    fail_msg("no row \"%s\"", name);
    return r;
}

static double row_ms(const row *r) {
    return r->ms[0] + r->ms[1] + r->ms[2];
}

/* Adds up all rows of a table but the last, "a step". */
static row add_up(const page *p, int module) {
    row sum, r;
    int i, k, in_modules = 0;
    memset(&sum, 0, sizeof sum);
    for (i = 0; i < p->lines; i++) {
        in_modules |= strncmp(p->line[i], "module ", 7) == 0;
        if (in_modules != module || !read_row(p->line[i], module, &r) ||
            strcmp(r.name, "a step") == 0)
            continue;
        for (k = 0; k < 3; k++) sum.ms[k] += r.ms[k];
        for (k = 0; k < 4; k++) sum.number[k] += r.number[k];
        sum.share += r.share;
    }
    return sum;
}

static int has(const page *p, const char *part) {
    for (int i = 0; i < p->lines; i++)
        if (strstr(p->line[i], part)) return 1;
    return 0;
}

/* ------------------------------------------------------------------------ the GPT */

/* What a run is to do, and what rank 0 measures besides. */
typedef struct job {
    int profile, evaluate;
    double ms, loss[STEPS]; /* of a step, by a clock around the loop */
    tsh_mem mem;            /* at the end */
} job;

static const job nothing = {0, 0, 0, {0}, {{0}, {0}, 0, 0, 0, 0, 0}}; /* neither */

static int train(tsh_ctx *ctx, void *user) {
    job *j = (job *)user;
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 1e-2};
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_tensor *targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_module *gpt = gpt_add(ctx);
    const int first = tsh_world(ctx)->rank == 0;
    tsh_optim *optim;
    int64_t begin;
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "plan");
    CHECK(tsh_materialize(gpt) == TSH_OK, "values");
    optim = tsh_optim_new(gpt, &adamw);
    if (j->profile && first) CHECK(tsh_profile(ctx, 1) == TSH_OK, "on");
    begin = tsh_now();
    for (int step = 0; step < STEPS; step++) {
        double loss = gpt_step(ctx, optim, ids, targets, step);
        if (first) j->loss[step] = loss;
        if (!j->evaluate) continue;
        tsh_no_grad_begin(ctx);
        tsh_scope_begin(ctx);
        CHECK(gpt_call(gpt, "wte", ids), "without gradients");
        tsh_scope_end(ctx);
        tsh_no_grad_end(ctx);
    }
    if (first) j->ms = (double)(tsh_now() - begin) / 1e6 / STEPS;
    if (first) j->mem = tsh_mem_stats(ctx);
    if (j->profile && first) CHECK(tsh_profile(ctx, 0) == TSH_OK, "off");
    CHECK_OK();
    return 0;
}

static void run(int ranks, job *j) {
    tsh_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.logger.log = hear;
    desc.logger.user = &told;
    told.lines = 0;
    ranks_run_with(ranks, &desc, train, j);
}

static void near(double a, double b, double part, const char *what) {
    if (!(fabs(a - b) <= part * fabs(b))) fail_msg("%s: %g, not %g", what, a, b);
}

/* Multiply-adds twice: of all linear layers of a step, at tp 1. */
static double linear_flops(void) {
    const double tokens = GPT_BATCH * GPT_CONTEXT, square = GPT_WIDTH * GPT_WIDTH;
    return 3 * 2 * tokens * (GPT_LAYERS * 12 * square + GPT_WIDTH * GPT_VOCABULARY);
}

static void rows_add_up_to_the_step(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        job plain = nothing, profiled = nothing;
        row step, ops, modules, r;
        char head[64];
        profiled.profile = 1;
        run(ranks, &plain);
        assert_int_equal(told.lines, 0);
        run(ranks, &profiled);
        assert_memory_equal(plain.loss, profiled.loss, sizeof plain.loss);
        (void)snprintf(head, sizeof head, "profile of rank 0 of %d (tp %d): %d steps of ", ranks,
                       ranks, STEPS);
        assert_true(has(&told, head));
        step = find_row(&told, 0, "a step");
        ops = add_up(&told, 0);
        modules = add_up(&told, 1);
        near(row_ms(&step), profiled.ms, 0.03, "a step, by a clock outside");
        near(row_ms(&ops), row_ms(&step), 0.01, "all ops");
        near(row_ms(&modules), row_ms(&step), 0.01, "all modules");
        near(ops.share, 100, 0.02, "shares"); /* of one decimal each */
        r = find_row(&told, 0, "tsh_linear");
        near(r.calls, 4 * GPT_LAYERS + 1, 1e-9, "calls of tsh_linear");
        assert_true(r.ms[0] > 0 && r.ms[1] > 0 && r.ms[2] < 1e-9);
        if (ranks == 1) near(r.number[0] * row_ms(&r) * 1e6, linear_flops(), 0.1, "work");
        r = find_row(&told, 0, "tsh_optim_step");
        assert_true(r.ms[0] + r.ms[1] < 1e-9 && r.ms[2] > 0);
        if (ranks > 1) {
            r = find_row(&told, 0, "all-reduce over tp");
            assert_true(r.calls > 1 && r.ms[0] > 0 && has(&told, "waits"));
            r = find_row(&told, 0, "wait over tp"); /* of what was started early, in backward */
            assert_true(r.ms[0] < 1e-9 && r.ms[2] < 1e-9);
        }
    }
}

static void bytes_add_up_to_the_statistics(void **state) {
    static const int kinds[] = {TSH_MEM_PARAMETERS, TSH_MEM_GRADIENTS, TSH_MEM_OPTIMISER};
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        job j = nothing;
        row sum, r;
        double free_then = 0, total = 0, books = 0, other = 0;
        j.profile = 1;
        run(ranks, &j);
        sum = add_up(&told, 1);
        for (int k = 0; k < COUNT(kinds); k++)
            near(sum.number[k] * 1e3, (double)j.mem.now[kinds[k]], 0.01, "bytes of a kind");
        for (int i = 0; i < told.lines; i++)
            (void)sscanf(told.line[i],
                         "kB held; besides: %lf of the step pool that was free then, %lf of other "
                         "tensors, %lf of handles, tape, modules, profile; in all %lf",
                         &free_then, &other, &books, &total);
        near((free_then + sum.number[3]) * 1e3, (double)j.mem.now[TSH_MEM_STEP], 0.01, "pool");
        near(total * 1e3, (double)j.mem.total, 0.01, "in all");
        near(sum.number[0] + sum.number[1] + sum.number[2] + sum.number[3] + free_then + other +
                 books,
             total, 0.01, "the sum of all");
        near(sum.number[3] * 1e3, (double)j.mem.step_live_peak, 0.5, "most of the step");
        r = find_row(&told, 1, "h.*.mlp.c_fc"); /* weight, bias; in blocks with headers */
        near(r.number[0] * 1e3,
             GPT_LAYERS * 4.0 * GPT_WIDTH / ranks * (GPT_WIDTH + 1) * (double)sizeof(tsh_real), 0.2,
             "one layer's parameters");
        near(r.number[2], 2 * r.number[0], 0.01, "Adam's moments");
        assert_true(r.number[3] > 0 && r.ms[0] > 0 && r.ms[1] > 0 && r.ms[2] > 0);
    }
}

static void evaluation_is_a_row_of_its_own(void **state) {
    job j = nothing;
    row r;
    (void)state;
    j.profile = j.evaluate = 1;
    run(2, &j);
    r = find_row(&told, 0, "tsh_embedding");
    near(r.calls, 2, 1e-9, "calls in training");
    r = find_row(&told, 0, "evaluation");
    assert_true(r.ms[0] > 0 && r.ms[1] + r.ms[2] < 1e-9);
    (void)find_row(&told, 1, "(evaluation)");
}

/* ------------------------------------------------------------- beginning and ending */

/* Two steps without a backward, then a part of one. */
static int infer(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc layer = {.in = 4, .out = 4};
    tsh_module *one = tsh_add_linear(tsh_root(ctx), "one", &layer);
    (void)user;
    CHECK(tsh_materialize(tsh_root(ctx)) == TSH_OK, "values");
    tsh_no_grad_begin(ctx);
    for (int i = 0; i < 3; i++) {
        CHECK(tsh_forward(one, tsh_ones(ctx, tsh_shape2(2, 4))), "forward");
        if (i < 2) CHECK(tsh_step_end(ctx) == TSH_OK, "end");
    }
    tsh_no_grad_end(ctx);
    return 0;
}

static void environment(void **state) {
    tsh_desc desc;
    tsh_ctx *ctx = NULL;
    (void)state;
    memset(&desc, 0, sizeof desc);
    desc.logger.log = hear;
    desc.logger.user = &told;
    told.lines = 0;
    assert_int_equal(setenv("TSHARD_PROFILE", "1", 1), 0);
    ranks_run_with(3, &desc, infer, NULL); /* the first step is left out, the last has no end */
    assert_true(has(&told, "profile of rank 0 of 3 (tp 3): 1 step of "));
    near(find_row(&told, 0, "tsh_linear").calls, 1, 1e-9, "calls");
    assert_true(!has(&told, "evaluation") && !has(&told, "profile of rank 1"));
    assert_int_equal(setenv("TSHARD_PROFILE", "yes", 1), 0);
    assert_int_equal(tsh_open(&desc, &ctx), TSH_ERR_ARGUMENT);
    assert_non_null(strstr(tsh_last_error(ctx)->message, "tsh_open: TSHARD_PROFILE is \"yes\""));
    tsh_close(ctx);
    assert_int_equal(unsetenv("TSHARD_PROFILE"), 0);
}

static void wrong_use_is_an_error(void **state) {
    const tsh_trace_desc trace = {.path = "build/never.json"};
    tsh_desc desc;
    tsh_ctx *ctx = NULL;
    (void)state;
    assert_int_equal(tsh_profile(NULL, 1), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_open(NULL, &ctx), TSH_OK);
    assert_int_equal(tsh_profile(ctx, 1), TSH_ERR_ARGUMENT);
    assert_non_null(strstr(tsh_last_error(ctx)->message, "such as tsh_log_stderr"));
    tsh_close(ctx);
    memset(&desc, 0, sizeof desc);
    desc.logger.log = hear;
    desc.logger.user = &told;
    assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
    assert_int_equal(tsh_profile(ctx, 0), TSH_ERR_STATE);
    assert_non_null(strstr(tsh_last_error(ctx)->message, "tsh_profile: no profile runs"));
    tsh_clear_error(ctx);
    assert_int_equal(tsh_profile(ctx, 1), TSH_OK);
    assert_int_equal(tsh_trace_end(ctx), TSH_ERR_STATE);
    tsh_clear_error(ctx);
    assert_int_equal(tsh_trace_begin(ctx, &trace), TSH_ERR_STATE);
    assert_non_null(strstr(tsh_last_error(ctx)->message, "a profile (tsh_profile, TSHARD_PROFILE) "
                                                         "runs already; end it first"));
    tsh_clear_error(ctx);
    assert_int_equal(tsh_profile(ctx, 1), TSH_ERR_STATE);
    tsh_clear_error(ctx);
    told.lines = 0;
    tsh_close(ctx); /* ends it: nothing ran */
    assert_true(has(&told, "profile of rank 0 of 1 (tp 1): 1 step of "));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_add_up_to_the_step),
        cmocka_unit_test(bytes_add_up_to_the_statistics),
        cmocka_unit_test(evaluation_is_a_row_of_its_own),
        cmocka_unit_test(environment),
        cmocka_unit_test(wrong_use_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
