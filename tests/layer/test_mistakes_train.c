/* Mistakes that a new user makes around a model, each with the sentence it gets: in training loops,
 * with optimisers, plans, ranks and files. A correct program gets no message. Mistakes within a
 * model's forward are in test_mistakes.c. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/small_gpt.h"
#include "../support/files.h"
#include "../support/logs.h"

static const tsh_linear_desc square = {.in = 4, .out = 4};

static tsh_tensor *leaf(tsh_ctx *ctx) {
    return tsh_requires_grad(tsh_keep(tsh_ones(ctx, tsh_shape2(2, 6))), 1);
}

/* A loss: the mean square of the module's output for an input of ones. */
static tsh_tensor *loss_of(tsh_module *module) {
    tsh_tensor *x = tsh_forward(module, tsh_ones(tsh_ctx_of(tsh_param(module, "weight")),
                                                 tsh_shape2(3, 4)));
    return tsh_mean(tsh_mul(x, x), TSH_ALL, 0);
}

/* A test of a function that CHECKs, on one rank without a backend: an error is forgotten after
 * tsh_backward, too, as there is no world that it ends. */
#define ON_ONE_RANK(name)                                                                          \
    static void test_##name(void **state) {                                                        \
        (void)state;                                                                               \
        ranks_failure[0][0] = '\0';                                                                \
        if (tsh_run(NULL, name, NULL)) fail_msg("%s", ranks_failure[0]);                           \
    }

/* --------------------------------------------------------------------- backward */

static int backward_twice(tsh_ctx *ctx, void *user) {
    static const char sentence[] =
        "tsh_backward: a tsh_backward before has consumed the graph of the loss; record it again, "
        "or add up all losses and call tsh_backward once";
    tsh_tensor *x = leaf(ctx), *y = tsh_mul(x, x);
    tsh_tensor *loss = tsh_sum(y, TSH_ALL, 0), *other = tsh_mean(y, TSH_ALL, 0);
    (void)user;
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "once");
    (void)tsh_backward(ctx, loss);
    CHECK_SAYS(TSH_ERR_STATE, sentence);
    (void)tsh_backward(ctx, other); /* of the same graph */
    CHECK_SAYS(TSH_ERR_STATE, sentence);
    CHECK(tsh_backward(ctx, tsh_sum(tsh_mul(x, x), TSH_ALL, 0)) == TSH_OK, "recorded again");
    return 0;
}
ON_ONE_RANK(backward_twice)

static int backward_of_no_loss(tsh_ctx *ctx, void *user) {
    tsh_tensor *x = leaf(ctx);
    (void)user;
    (void)tsh_backward(ctx, tsh_mul(x, x));
    CHECK_SAYS(TSH_ERR_SHAPE,
               "tsh_backward: the loss must be one replicated value, not f32 (2, 6) R, as "
               "tsh_mean(loss, TSH_ALL, 0) gives");
    (void)tsh_backward(ctx, NULL);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_backward: the loss is NULL");
    (void)tsh_backward(ctx, tsh_sum(tsh_ones(ctx, tsh_shape1(3)), 0, 0));
    CHECK_SAYS(TSH_ERR_STATE,
               "tsh_backward: the loss does not depend on any tensor that requires a gradient; "
               "parameters do, and tensors after tsh_requires_grad(t, 1), but not through "
               "tsh_detach or what is computed after tsh_no_grad_begin");
    tsh_no_grad_begin(ctx); /* for an evaluation, without its end */
    (void)tsh_backward(ctx, tsh_sum(x, TSH_ALL, 0));
    CHECK_SAYS(TSH_ERR_STATE, "requires a gradient; nothing is recorded since tsh_no_grad_begin: "
                              "call tsh_no_grad_end first");
    return 0;
}
ON_ONE_RANK(backward_of_no_loss)

static int backward_of_a_partial_loss(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc desc = {.in = 4, .out = 8, .style = TSH_COLWISE};
    tsh_tensor *y = tsh_forward(tsh_add_linear(tsh_root(ctx), "a", &desc),
                                tsh_ones(ctx, tsh_shape2(3, 4)));
    (void)user;
    (void)tsh_barrier(tsh_world(ctx)); /* an error ends the world */
    (void)tsh_backward(ctx, tsh_mean(y, TSH_ALL, 0));
    CHECK(ranks_says(ctx, TSH_ERR_LAYOUT,
                     "tsh_backward: the loss is a partial sum over 2 ranks; complete it first: "
                     "tsh_redistribute(loss, tsh_replicated())"), "its sentence");
    return 0;
}

static void test_backward_of_a_partial_loss(void **state) {
    (void)state;
    ranks_run(2, backward_of_a_partial_loss, NULL);
}

static int values_given_back(tsh_ctx *ctx, void *user) {
    static const char sentence[] =
        " were given back by tsh_backward, tsh_step_end or "
        "tsh_scope_end; tsh_retain_grad or tsh_keep would have kept them";
    tsh_tensor *x = leaf(ctx), *y = tsh_mul(x, x), *loss = tsh_sum(y, TSH_ALL, 0);
    (void)user;
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    (void)tsh_exp(y);
    CHECK(ranks_says(ctx, TSH_ERR_STALE, "tsh_exp: the values of x"), "the op");
    CHECK_SAYS(TSH_ERR_STALE, sentence);
    CHECK(tsh_step_end(ctx) == TSH_OK, "end");
    (void)tsh_item(ctx, loss); /* to print it, too late */
    CHECK(ranks_says(ctx, TSH_ERR_STALE, "tsh_item: the values of t"), "the function");
    CHECK_SAYS(TSH_ERR_STALE, sentence);
    return 0;
}
ON_ONE_RANK(values_given_back)

static int write_of_what_is_recorded(tsh_ctx *ctx, void *user) {
    const tsh_real values[12] = {0};
    tsh_tensor *x = leaf(ctx), *y = tsh_mul(x, x);
    (void)user;
    (void)tsh_write(ctx, x, TSH_GLOBAL, values, sizeof values);
    CHECK_SAYS(TSH_ERR_STATE,
               "tsh_write: ops are recorded that used the tensor's values, and backward needs "
               "these; call tsh_backward or tsh_step_end first, or write to another tensor");
    (void)tsh_write(ctx, y, TSH_GLOBAL, values, sizeof values);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_write: takes an owned tensor; tsh_keep makes one");
    return 0;
}
ON_ONE_RANK(write_of_what_is_recorded)

/* ------------------------------------------------------------------- optimisers */

static int step_without_the_other_replicas(tsh_ctx *ctx, void *user) {
    const tsh_backward_desc defer = {.defer = 1};
    tsh_module *a = tsh_add_linear(tsh_root(ctx), "a", &square);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), NULL);
    (void)user;
    CHECK(tsh_backward_with(ctx, loss_of(a), &defer) == TSH_OK, "the only micro-batch");
    (void)tsh_barrier(tsh_world(ctx)); /* an error ends the world */
    (void)tsh_optim_step(optim);
    CHECK(ranks_says(ctx, TSH_ERR_STATE,
                     "norm of gradients: that of \"a.weight\" is pending (.defer); call "
                     "tsh_sync_grads before tsh_optim_step or tsh_clip_grad_norm"), "told");
    return 0;
}

static void test_step_without_the_other_replicas(void **state) {
    const tsh_desc desc = {.tp = 1};
    (void)state;
    ranks_run_with(2, &desc, step_without_the_other_replicas, NULL);
}

static int options_of_an_optimiser(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc negative = {.kind = TSH_ADAMW, .lr = -0.1};
    tsh_optim *optim;
    (void)user;
    tsh_add_linear(tsh_root(ctx), "a", &square);
    CHECK(!tsh_optim_new(tsh_root(ctx), &negative), "a negative rate");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_optim_new: kind 2, lr -0.1, ");
    optim = tsh_optim_new(tsh_root(ctx), NULL);
    (void)tsh_optim_group(optim, "*.bais", 1, 0);
    CHECK_SAYS(TSH_ERR_ARGUMENT,
               "tsh_optim_group: \"*.bais\" matches none of the 2 parameters, the first of which "
               "is \"a.weight\"; * stays within a name, ** is any number of names, as in "
               "\"**.bias\"");
    (void)tsh_optim_group(optim, "**.bias", -1, 0);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_optim_group: \"**.bias\" gets lr_scale -1 and weight_decay "
                                 "0; neither may be below 0");
    (void)tsh_optim_group(optim, "**.bias", 1, (double)NAN);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "neither may be below 0");
    return 0;
}
ON_ONE_RANK(options_of_an_optimiser)

/* tsh_summary of `module` ends with these lines. */
static int summary_ends(tsh_ctx *ctx, tsh_module *module, const char *lines) {
    char text[8192];
    FILE *file = tmpfile();
    size_t n;
    CHECK(file && tsh_summary(module, file) == TSH_OK, "summary");
    rewind(file);
    n = fread(text, 1, sizeof text - 1, file);
    text[n] = '\0';
    (void)fclose(file);
    CHECK(n > strlen(lines) && !strcmp(text + n - strlen(lines), lines), "%s", text);
    return 0;
}

/* "*.bias" does not cross a dot, and the summary shows it: 1 of 20. */
static int groups_in_the_summary(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.25, .weight_decay = 0.5};
    const tsh_optim_desc sgd = {.lr = 2};
    tsh_module *gpt = gpt_add(ctx);
    tsh_optim *optim;
    (void)user;
    if (summary_ends(ctx, tsh_find(gpt, "ln_f"), " are trained\n")) return 1;
    optim = tsh_optim_new(gpt, &adamw);
    CHECK(tsh_optim_group(optim, "*.bias", 1, 0) == TSH_OK, "of ln_f");
    if (summary_ends(ctx, gpt,
                     " are trained\n"
                     "adamw: 27 parameters, the first \"wte.weight\": lr 0.25, weight decay 0.5\n"
                     "adamw: 1 parameters, the first \"ln_f.bias\": lr 0.25, weight decay 0\n"))
        return 1;
    CHECK(tsh_optim_group(optim, "**.bias", 1, 0) == TSH_OK, "all");
    CHECK(tsh_optim_group(optim, "wpe.*", 0.5, 0) == TSH_OK, "another rate");
    CHECK(tsh_optim_new(tsh_find(gpt, "h.1"), &sgd), "of a block");
    if (summary_ends(ctx, gpt,
                     "adamw: 14 parameters, the first \"wte.weight\": lr 0.25, weight decay 0.5\n"
                     "adamw: 1 parameters, the first \"wpe.weight\": lr 0.125, weight decay 0\n"
                     "adamw: 13 parameters, the first \"h.0.ln_1.bias\": lr 0.25, weight decay 0\n"
                     "sgd: 12 parameters, the first \"h.1.ln_1.weight\": lr 2, weight decay 0\n"))
        return 1;
    return summary_ends(ctx, tsh_find(gpt, "h.1"),
                        " are trained\n"
                        "sgd: 12 parameters, the first \"ln_1.weight\": lr 2, weight decay 0\n");
}
ON_ONE_RANK(groups_in_the_summary)

/* ------------------------------------------------------------------------ plans */

static int refuses(tsh_ctx *ctx, const tsh_plan_rule *rule, tsh_result code, const char *says) {
    CHECK(tsh_parallelize(tsh_root(ctx), rule, 1) == code, "refused");
    CHECK_SAYS(code, says);
    return 0;
}

static int plans(tsh_ctx *ctx, void *user) {
    const tsh_plan_rule typo = {.path = "h.*.mlp.c_fcc", .style = TSH_COLWISE};
    const tsh_plan_rule norm = {.path = "h.*.ln_1", .style = TSH_ROWWISE};
    const tsh_plan_rule kind = {.path = "wte", .style = TSH_ROWWISE, .kind = "linear"};
    const tsh_plan_rule cut = {.path = "h.*.mlp.c_fc", .style = TSH_COLWISE, .segments = 3};
    tsh_module *gpt = gpt_add(ctx);
    (void)user;
    if (refuses(ctx, &typo, TSH_ERR_ARGUMENT,
                "tsh_parallelize: rule \"h.*.mlp.c_fcc\" matches no module that takes its style; "
                "near it are \"h.0.mlp.c_fc\", \"h.1.mlp.c_fc\",") ||
        refuses(ctx, &norm, TSH_ERR_ARGUMENT,
                "tsh_parallelize: rule \"h.*.ln_1\" matches no module that takes its style; "
                "\"h.0.ln_1\" is of kind \"layer_norm\"") ||
        refuses(ctx, &kind, TSH_ERR_ARGUMENT, "\"wte\" is of kind \"embedding\"") ||
        refuses(ctx, &cut, TSH_ERR_LAYOUT,
                "tsh_parallelize: \"h.0.mlp.c_fc.weight\" (64, 16) R does not divide into 3 "
                "segments of units of 1"))
        return 1;
    (void)tsh_parallelize_policy(gpt, tsh_policy_find("gpt-2"));
    CHECK_SAYS(TSH_ERR_ARGUMENT,
               "tsh_parallelize_policy: there is no policy (NULL is what tsh_policy_find returns "
               "for an unknown name); those it knows are gpt2 gpt_neo");
    (void)tsh_parallelize_policy(gpt, tsh_policy_find("bert"));
    CHECK(ranks_says(ctx, TSH_ERR_ARGUMENT, "tsh_parallelize_policy: bert: \""), "the policy");
    CHECK_SAYS(TSH_ERR_ARGUMENT, " matches no block below \"\"; near it are \"");
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "the plan");
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "twice is once");
    CHECK(tsh_materialize(gpt) == TSH_OK, "values");
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "with values, too");
    return 0;
}

static void test_plans(void **state) {
    int ranks;
    (void)state;
    for (ranks = 1; ranks <= 4; ranks++) ranks_run(ranks, plans, NULL);
}

/* ------------------------------------------------------------------ ranks differ */

static int never_runs(tsh_ctx *ctx, void *user) {
    (void)ctx, (void)user;
    return 0;
}

static void test_degrees_that_do_not_divide(void **state) {
    static log_lines lines;
    const tsh_desc desc = {.tp = 3, .logger = {log_keep, &lines}};
    int i;
    (void)state;
    lines.count = 0;
    assert_int_not_equal(tsh_threads_run(4, &desc, never_runs, NULL), 0);
    for (i = 0; i < lines.count && i < LOG_LINES; i++)
        if (strstr(lines.line[i], "tsh_open: 4 ranks do not divide into tp 3 times pp 1; tp may "
                                  "be 1, 2 or 4"))
            return;
    fail_msg("%s", lines.line[0]);
}

/* One rank has a layer more, which is never called; before the first step or after it. */
typedef struct extra_case {
    int after, odd; /* odd: that rank */
} extra_case;

static int extra_layer(tsh_ctx *ctx, void *user) {
    const extra_case *c = (const extra_case *)user;
    const int rank = tsh_world(ctx)->rank;
    tsh_module *root = tsh_root(ctx), *one = tsh_add_linear(root, "one", &square);
    char blames[96];
    CHECK(one && tsh_materialize(root) == TSH_OK, "the model");
    if (c->after) CHECK(tsh_check_replicas(root), "all are alike");
    if (c->after) CHECK(tsh_check_replicas(one), "and below a module");
    if (rank == c->odd) CHECK(tsh_add_linear(root, "extra", &square), "never called");
    CHECK(!tsh_check_replicas(one), "one rank has more");
    (void)snprintf(blames, sizeof blames, "rank %d has \"extra\" linear: weight %s (4, 4) R",
                   c->odd, sizeof(tsh_real) == 4 ? "f32" : "f64");
    CHECK(ranks_says(ctx, TSH_ERR_MISMATCH, blames), "%s", blames);
    CHECK(ranks_says(ctx, TSH_ERR_MISMATCH, "has nothing; build the same model on each"), "so");
    CHECK(tsh_last_error(ctx)->rank == c->odd, "rank %d", tsh_last_error(ctx)->rank);
    return 0;
}

static void test_extra_layer_on_one_rank(void **state) {
    extra_case c = {0, 1};
    tsh_desc desc;
    int ranks;
    (void)state;
    memset(&desc, 0, sizeof desc);
    for (ranks = 2; ranks <= 4; ranks++)
        for (c.after = 0; c.after < 2; c.after++)
            for (desc.tp = 1; desc.tp <= ranks; desc.tp++) {
                if (ranks % desc.tp) continue;
                c.odd = ranks - 1;
                ranks_run_with(ranks, &desc, extra_layer, &c);
            }
}

/* What the last rank does differently, and a part of the sentence. */
typedef enum difference { OTHER_SHAPE, OTHER_NAME, OTHER_PLAN, DIFFERENCES } difference;

static int differs(tsh_ctx *ctx, void *user) {
    static const char *const says[DIFFERENCES] = {
        " has \"a\" linear: weight f32 (5, 4) R, bias f32 (5) R",
        " has \"b\" linear: weight f32 (4, 4) R, bias f32 (4) R",
        " has \"a\" linear: weight f32 (4, 4) S(0), bias f32 (4) S(0)"};
    const difference what = *(const difference *)user;
    const tsh_plan_rule rule = {.path = "a", .style = TSH_COLWISE};
    const int odd = tsh_world(ctx)->rank == tsh_world(ctx)->size - 1;
    const tsh_linear_desc desc = {.in = 4, .out = odd && what == OTHER_SHAPE ? 5 : 4};
    tsh_module *root = tsh_root(ctx), *a;
    double one = 1;
    a = tsh_add_linear(root, odd && what == OTHER_NAME ? "b" : "a", &desc);
    if (odd && what == OTHER_PLAN) CHECK(tsh_parallelize(root, &rule, 1) == TSH_OK, "a plan");
    (void)tsh_forward(a, tsh_ones(ctx, tsh_shape2(3, 4)));
    CHECK(tsh_allreduce(tsh_world(ctx), &one, 1, TSH_F64, TSH_SUM) == TSH_ERR_MISMATCH, "told");
    (void)tsh_ok(ctx);
    CHECK(ranks_says(ctx, TSH_ERR_MISMATCH, "the ranks of the world built different models: "),
          "what is wrong");
    CHECK(ranks_says(ctx, TSH_ERR_MISMATCH, says[what]), "where: %s", says[what]);
    return 0;
}

static void test_models_that_differ(void **state) {
    int what, ranks;
    (void)state;
    for (what = 0; what < DIFFERENCES; what++)
        for (ranks = 2; ranks <= 4; ranks++) {
            difference d = (difference)what;
            ranks_run(ranks, differs, &d);
        }
}

/* ------------------------------------------------------------------------ files */

static int files_that_do_not_fit(tsh_ctx *ctx, void *user) {
    const tsh_file_desc gpt = {.prefix = "gpt"};
    const tsh_linear_desc wide = {.in = 4, .out = 5};
    tsh_module *root = tsh_root(ctx), *whole = tsh_add_module(root, "gpt", NULL), *other;
    (void)user;
    tsh_add_linear(whole, "a", &square);
    tsh_add_linear(whole, "b", &square);
    CHECK(tsh_save(root, files_path("whole"), NULL) == TSH_OK, "gpt.a and gpt.b");
    (void)tsh_load(whole, files_path("whole"), NULL);
    CHECK(ranks_says(ctx, TSH_ERR_ARGUMENT, "tsh_load: \"/"), "the file");
    CHECK_SAYS(TSH_ERR_ARGUMENT,
               "/whole\" lacks 4 of the model's tensors (\"a.weight\") and has 4 that the model "
               "lacks (\"gpt.a.weight\"); tsh_load_with takes .prefix = \"gpt\"");
    CHECK(tsh_load_with(whole, files_path("whole"), NULL, &gpt) == TSH_OK, "so");
    other = tsh_add_module(root, "other", NULL);
    tsh_add_linear(other, "a", &square);
    tsh_add_linear(other, "c", &square);
    CHECK(tsh_save(whole, files_path("a_b"), NULL) == TSH_OK, "a and b");
    (void)tsh_load(other, files_path("a_b"), NULL);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "/a_b\" lacks 2 of the model's tensors (\"c.weight\") and has 2 "
                                 "that the model lacks (\"b.bias\")");
    other = tsh_add_module(root, "third", NULL);
    tsh_add_linear(other, "a", &wide);
    tsh_add_linear(other, "b", &square);
    (void)tsh_load(other, files_path("a_b"), NULL);
    CHECK(ranks_says(ctx, TSH_ERR_SHAPE, "tsh_load: \"a.weight\" is F32 (4, 4) in \"/"), "file");
    CHECK_SAYS(TSH_ERR_SHAPE, "/a_b\", F32 (5, 4) in the model");
    (void)tsh_load(whole, files_path("a_b"), tsh_optim_new(whole, NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "/a_b\" holds no optimiser's state, the optimiser is sgd; NULL "
                                 "for it loads the parameters alone");
    (void)tsh_load(whole, files_path("model.pt"), NULL);
    CHECK_SAYS(TSH_ERR_IO, "/model.pt\" is a zip archive, as torch.save writes "
                           "(safetensors.torch.save_file converts it)");
    (void)tsh_load(whole, files_path("model.csv"), NULL);
    CHECK_SAYS(TSH_ERR_IO, "/model.csv\" is a text; tsh_load takes one safetensors file");
    (void)tsh_load(whole, files_path("nowhere"), NULL);
    CHECK_SAYS(TSH_ERR_IO, "/nowhere\" cannot be opened: No such file or directory");
    return 0;
}

static void test_files_that_do_not_fit(void **state) {
    static const char zip[] = "PK\3\4 and what torch.save writes next";
    static const char table[] = "epoch,loss\n1,4.25\n2,3.125\n";
    int ranks;
    (void)state;
    for (ranks = 1; ranks <= 3; ranks++) {
        if (FILES_MINE) files_write("model.pt", zip, sizeof zip - 1);
        if (FILES_MINE) files_write("model.csv", table, sizeof table - 1);
        ranks_run(ranks, files_that_do_not_fit, NULL);
        files_clear();
    }
}

/* -------------------------------------------------------------------- warnings */

static const char warn_grads[] =
    "warning: tsh_backward adds to gradients that tsh_optim_step has used; call tsh_zero_grads "
    "after each tsh_optim_step";
static const char warn_step[] =
    "warning: memory grows: many calls of tsh_optim_step, and no tsh_step_end between them; call "
    "tsh_step_end at the end of each step";
static const char warn_none[] =
    "warning: tsh_optim_step changes nothing, as no parameter has a gradient; call tsh_backward "
    "before it, and tsh_zero_grads only after it";
static const char warn_late[] =
    "warning: \"b.weight\" was added after tsh_optim_new and is never updated; call tsh_optim_new "
    "when the model is complete";

static const char warn_blocks[] =
    "warning: tsh_optim_new: 1 weights, such as \"a.weight\", are q4_0 and stay as they are; only "
    "the other 3 parameters are trained. To train all, load the model unquantised";

static log_lines lines; /* of rank 0, which alone warns */

/* Runs fn with a logger; asserts that it gets just these warnings, each once. */
static void expect_warnings(int ranks, tsh_desc desc, int (*fn)(tsh_ctx *, void *), void *user,
                            const char *first, const char *second) {
    const int want = (first != NULL) + (second != NULL);
    lines.count = 0;
    desc.logger.log = log_keep;
    desc.logger.user = &lines;
    ranks_run_at(RANKS_FIRST, ranks, &desc, fn, user);
    if (!FILES_MINE) return;
    if (lines.count > want) fail_msg("%d ranks: \"%s\"", ranks, lines.line[lines.count - 1]);
    if (first && log_holds(&lines, first) != 1) fail_msg("%d ranks: no %s", ranks, first);
    if (second && log_holds(&lines, second) != 1) fail_msg("%d ranks: no %s", ranks, second);
}

/* What a training loop forgets. */
typedef enum forgotten { NOTHING, ZERO_GRADS, STEP_END, BOTH } forgotten;

/* 100 steps of two micro-batches, the first deferred. Gradients of "b" stay from the first on. */
static int forget(tsh_ctx *ctx, void *user) {
    const forgotten f = *(const forgotten *)user;
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 1e-3};
    const tsh_backward_desc defer = {.defer = 1};
    tsh_module *root = tsh_root(ctx), *a = tsh_add_linear(root, "a", &square);
    tsh_module *b = tsh_add_linear(root, "b", &square);
    tsh_optim *first, *second;
    CHECK(tsh_materialize(root) == TSH_OK, "the model");
    first = tsh_optim_new(a, &sgd);
    second = tsh_optim_new(b, &sgd);
    CHECK(tsh_backward(ctx, loss_of(b)) == TSH_OK, "b");
    CHECK(tsh_optim_step(second) == TSH_OK && tsh_step_end(ctx) == TSH_OK, "b");
    for (int i = 0; i < 100; i++) {
        CHECK(tsh_backward_with(ctx, loss_of(a), &defer) == TSH_OK, "step %d", i);
        CHECK(tsh_backward(ctx, loss_of(a)) == TSH_OK, "step %d", i);
        CHECK(tsh_optim_step(first) == TSH_OK, "step %d", i);
        if (!(f & ZERO_GRADS)) tsh_zero_grads(a);
        if (!(f & STEP_END)) (void)tsh_step_end(ctx);
    }
    return 0;
}

static void test_forgotten_calls(void **state) {
    const tsh_desc desc = {.tp = 1};
    int f, ranks;
    (void)state;
    for (ranks = 1; ranks <= 4; ranks++)
        for (f = NOTHING; f <= BOTH; f++) {
            forgotten what = (forgotten)f;
            expect_warnings(ranks, desc, forget, &what, f & ZERO_GRADS ? warn_grads : NULL,
                            f & STEP_END ? warn_step : NULL);
        }
}

/* user: where gradients are zeroed. */
typedef enum zeroed { NO_BACKWARD, TOO_EARLY, IN_TIME } zeroed;

static int step_without_gradients(tsh_ctx *ctx, void *user) {
    const zeroed when = *(const zeroed *)user;
    tsh_module *a = tsh_add_linear(tsh_root(ctx), "a", &square);
    tsh_optim *optim = tsh_optim_new(a, NULL);
    for (int i = 0; i < 5; i++) {
        tsh_tensor *loss = loss_of(a);
        if (when != NO_BACKWARD) CHECK(tsh_backward(ctx, loss) == TSH_OK, "step %d", i);
        if (when == TOO_EARLY) tsh_zero_grads(a);
        CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", i);
        tsh_zero_grads(a);
        CHECK(tsh_step_end(ctx) == TSH_OK, "step %d", i);
    }
    return 0;
}

static void test_steps_without_gradients(void **state) {
    const tsh_desc desc = {.tp = 0};
    int ranks, i;
    (void)state;
    for (ranks = 1; ranks <= 2; ranks++)
        for (i = NO_BACKWARD; i <= IN_TIME; i++) {
            zeroed when = (zeroed)i;
            expect_warnings(ranks, desc, step_without_gradients, &when,
                            when == IN_TIME ? NULL : warn_none, NULL);
        }
}

/* user: 1: the younger layer has an optimiser of its own. */
static int layer_after_the_optimiser(tsh_ctx *ctx, void *user) {
    tsh_module *root = tsh_root(ctx), *a = tsh_add_linear(root, "a", &square), *b;
    tsh_optim *optim = tsh_optim_new(root, NULL);
    tsh_param_desc buffer = {.buffer = 1};
    tsh_add_param(root, "c", tsh_shape1(4), &buffer);
    b = tsh_add_linear(root, "b", &square);
    if (*(const int *)user) CHECK(tsh_optim_new(b, NULL), "its own");
    for (int i = 0; i < 3; i++) {
        CHECK(tsh_backward(ctx, tsh_add(loss_of(a), loss_of(b))) == TSH_OK, "step %d", i);
        CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", i);
        tsh_zero_grads(root);
        CHECK(tsh_step_end(ctx) == TSH_OK, "step %d", i);
    }
    return 0;
}

static void test_layers_after_the_optimiser(void **state) {
    const tsh_desc desc = {.tp = 0};
    int ranks, own;
    (void)state;
    for (ranks = 1; ranks <= 3; ranks++)
        for (own = 0; own < 2; own++)
            expect_warnings(ranks, desc, layer_after_the_optimiser, &own, own ? NULL : warn_late,
                            NULL);
}

/* user: how many of two layers are quantised. */
static int quantised_weights(tsh_ctx *ctx, void *user) {
    const int quantised = *(const int *)user;
    const tsh_linear_desc block = {.in = 32, .out = 32};
    tsh_module *root = tsh_root(ctx), *layer[2];
    layer[0] = tsh_add_linear(root, "a", &block);
    layer[1] = tsh_add_linear(root, "b", &block);
    CHECK(tsh_materialize(root) == TSH_OK, "the model");
    for (int i = 0; i < quantised; i++)
        CHECK(tsh_quantize(layer[i], NULL, TSH_Q4_0) == TSH_OK, "layer %d", i);
    for (int i = 0; i < 2; i++) CHECK(tsh_optim_new(root, NULL), "optimiser %d", i);
    return 0;
}

static void test_quantised_weights_beside_others(void **state) {
    const tsh_desc desc = {.tp = 0};
    int ranks, quantised;
    (void)state;
    for (ranks = 1; ranks <= 2; ranks++)
        for (quantised = 0; quantised < 2; quantised++)
            expect_warnings(ranks, desc, quantised_weights, &quantised,
                            quantised ? warn_blocks : NULL, NULL);
}

/* ----------------------------------------------------------------- a pipeline */

static tsh_tensor *ones(tsh_ctx *ctx, int k, void *user) {
    (void)k, (void)user;
    return tsh_ones(ctx, tsh_shape2(3, 4));
}

static tsh_tensor *mean_square(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    (void)ctx, (void)k, (void)user;
    return tsh_mean(tsh_mul(y, y), TSH_ALL, 0);
}

/* What a training loop with a pipeline does. FROZEN: the last layer alone is trained. */
typedef enum loop { WHOLE, FROZEN, FORGETS, LOOPS } loop;

static int stages(tsh_ctx *ctx, void *user) {
    const loop what = *(const loop *)user;
    const tsh_pipeline_desc desc = {.micro_batches = 3, .input = ones, .loss = mean_square};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipeline;
    tsh_optim *optim;
    double loss;
    tsh_add_linear(h, "0", &square);
    tsh_add_linear(h, "1", &square);
    pipeline = tsh_pipeline_new(h, &desc);
    optim = tsh_optim_new(h, NULL);
    if (what == FROZEN) tsh_requires_grad(tsh_param(h, "0.weight"), 0);
    if (what == FROZEN) tsh_requires_grad(tsh_param(h, "0.bias"), 0);
    for (int i = 0; i < 40; i++) {
        CHECK(tsh_pipeline_train(pipeline, &loss) == TSH_OK, "step %d", i);
        CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", i);
        if (what != FORGETS) tsh_zero_grads(h);
        CHECK(tsh_step_end(ctx) == TSH_OK, "step %d", i);
        if (i % 10 == 0) CHECK(tsh_pipeline_evaluate(pipeline, 0, &loss) == TSH_OK, "%d", i);
    }
    return 0;
}

static void test_a_pipeline(void **state) {
    tsh_desc desc = {.tp = 1};
    int i;
    (void)state;
    for (desc.pp = 1; desc.pp <= 2; desc.pp++)
        for (i = WHOLE; i < LOOPS; i++) {
            loop what = (loop)i;
            expect_warnings(2, desc, stages, &what, what == FORGETS ? warn_grads : NULL, NULL);
        }
}

/* -------------------------------------------------------- no mistakes */

/* A GPT as it is trained: two micro-batches a step, evaluations, groups, a checkpoint. user: .zero
 * of the optimiser. */
static int no_mistake(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc adamw = {
        .kind = TSH_ADAMW, .lr = 1e-3, .clip_norm = 1, .zero = *(const int *)user};
    const tsh_backward_desc defer = {.defer = 1};
    const tsh_shape batch = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, batch, tsh_replicated());
    tsh_tensor *targets = tsh_tensor_new(ctx, TSH_I32, batch, tsh_replicated());
    tsh_module *gpt = gpt_add(ctx);
    tsh_optim *optim;
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "plan");
    CHECK((optim = tsh_optim_new(gpt, &adamw)) != NULL, "optimiser");
    CHECK(tsh_optim_group(optim, "**.bias", 1, 0) == TSH_OK, "group");
    for (int i = 0; i < 40; i++) {
        for (int k = 0; k < 2; k++) {
            tsh_tensor *loss;
            gpt_load(ctx, ids, targets, 2 * i + k);
            loss = tsh_cross_entropy(gpt_logits(gpt, ids), targets, NULL);
            CHECK(tsh_backward_with(ctx, loss, k ? NULL : &defer) == TSH_OK, "step %d", i);
        }
        CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", i);
        tsh_zero_grads(gpt);
        CHECK(tsh_step_end(ctx) == TSH_OK, "step %d", i);
        if (i % 10) continue;
        tsh_train(gpt, 0);
        tsh_no_grad_begin(ctx);
        tsh_scope_begin(ctx);
        (void)tsh_item(ctx, tsh_cross_entropy(gpt_logits(gpt, ids), targets, NULL));
        tsh_scope_end(ctx);
        tsh_no_grad_end(ctx);
        tsh_train(gpt, 1);
    }
    CHECK(tsh_check_replicas(gpt), "all ranks are alike");
    CHECK(tsh_save(gpt, files_path("gpt"), optim) == TSH_OK, "save");
    CHECK(tsh_load(gpt, files_path("gpt"), optim) == TSH_OK, "load");
    return 0;
}

static void test_no_mistake_and_no_message(void **state) {
    tsh_desc desc = {.tp = 1};
    int ranks, zero;
    (void)state;
    for (ranks = 1; ranks <= 4; ranks++)
        for (desc.tp = 1; desc.tp <= ranks; desc.tp++)
            for (zero = 0; zero < 2 && ranks % desc.tp == 0; zero++)
                expect_warnings(ranks, desc, no_mistake, &zero, NULL, NULL);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_backward_twice),
        cmocka_unit_test(test_backward_of_no_loss),
        cmocka_unit_test(test_backward_of_a_partial_loss),
        cmocka_unit_test(test_values_given_back),
        cmocka_unit_test(test_write_of_what_is_recorded),
        cmocka_unit_test(test_step_without_the_other_replicas),
        cmocka_unit_test(test_options_of_an_optimiser),
        cmocka_unit_test(test_groups_in_the_summary),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_degrees_that_do_not_divide),
        cmocka_unit_test(test_extra_layer_on_one_rank),
        cmocka_unit_test(test_models_that_differ),
        cmocka_unit_test_teardown(test_files_that_do_not_fit, files_after),
        cmocka_unit_test(test_forgotten_calls),
        cmocka_unit_test(test_steps_without_gradients),
        cmocka_unit_test(test_layers_after_the_optimiser),
        cmocka_unit_test(test_quantised_weights_beside_others),
        cmocka_unit_test(test_a_pipeline),
        cmocka_unit_test_teardown(test_no_mistake_and_no_message, files_after),
    };
    return cmocka_run_group_tests(tests, files_begin, files_end);
}
