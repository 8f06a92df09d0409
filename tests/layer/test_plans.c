/* Plans in full: TSH_AUTO, PREPARE rules, classifiers with weights of their own or tied, rules
 * limited to a kind, reports and summaries; all against the dense model at every degree. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

#define ROUNDING 2e-5 /* exponentials, and sums in another order than one rank's */

static tsh_module *container(probe *p, const tsh_module_desc *desc) {
    char name[32];
    (void)snprintf(name, sizeof name, "part_%d", p->number);
    return tsh_add_module(tsh_root(p->ctx), name, desc);
}

static tsh_module *linear(tsh_module *parent, const char *name, int64_t in, int64_t out) {
    const tsh_linear_desc desc = {.in = in, .out = out};
    return tsh_add_linear(parent, name, &desc);
}

/* Integers for a parameter, by path. */
static tsh_tensor *set(probe *p, tsh_module *module, const char *path, uint64_t seed) {
    tsh_tensor *t = tsh_param(module, path);
    ranks_set(p->ctx, t, seed);
    return t;
}

/* -- auto ------------------------------------------------------------------- */

/* Two layers in a row under one rule: the first gets a whole input, the second a cut one. "late":
 * they hold values before. An input that is cut by units of 2 is what the first one takes. */
static tsh_tensor *plan_auto(probe *p) {
    const tsh_plan_rule rule = {.path = "**", .style = TSH_AUTO};
    tsh_module *self = container(p, NULL);
    tsh_module *up = linear(self, "up", tsh_size(p->in[0], -1), 6),
               *down = linear(self, "down", 6, 3);
    tsh_tensor *y;
    if (probe_has(p, "late")) tsh_materialize(self);
    if (!p->dense) tsh_parallelize(self, &rule, 1);
    tsh_materialize(self);
    if (probe_has(p, "late")) { /* the initial values stay, cut as the first input says */
        y = tsh_forward(self, p->in[0]);
    } else {
        set(p, self, "up.weight", 40);
        set(p, self, "up.bias", 41);
        set(p, self, "down.weight", 42);
        set(p, self, "down.bias", 43);
        y = tsh_forward(self, p->in[0]);
    }
    p->watched[0] = tsh_param(up, "weight");
    p->watched[1] = tsh_param(down, "bias");
    if (!p->dense && tsh_tp(p->ctx)->size > 1) {
        int cut = tsh_layout_of(p->in[0]).kind == TSH_SHARDED;
        if (tsh_layout_of(p->watched[0]).dim != cut)
            tsh_fail(p->ctx, TSH_ERR_STATE, "auto chose the other style");
    }
    return y;
}

/* -- classifiers ------------------------------------------------------------ */

/* "own", or tied to an embedding that is cut before ("born"), by the plan, or not at all. */
static tsh_tensor *plan_classifier(probe *p) {
    const tsh_style style = p->dense ? TSH_PLAIN : probe_has(p, "col") ? TSH_COLWISE : TSH_ROWWISE;
    const tsh_style rows = style == TSH_COLWISE ? TSH_ROWWISE : TSH_COLWISE; /* of an embedding */
    const tsh_plan_rule plan[] = {{.path = "wte", .style = rows}, {.path = "head", .style = style}};
    const int own = probe_has(p, "own"), born = probe_has(p, "born");
    tsh_embedding_desc table = {.count = p->n, .dim = 4};
    tsh_classifier_desc desc = {.in = 4, .classes = p->n};
    tsh_module *self = container(p, NULL), *wte, *head;
    tsh_tensor *x = p->in[0];
    if (own == probe_has(p, "tied") || (style == TSH_ROWWISE) != (probe_has(p, "row") && !p->dense))
        return NULL;
    if (born && !p->dense) table.style = rows;
    wte = tsh_add_embedding(self, "wte", &table);
    if (!own) desc.weight = tsh_param(wte, "weight");
    if (own && !p->dense) desc.style = style;
    desc.gather_output = probe_has(p, "gather") && !p->dense;
    head = tsh_add_classifier(self, "head", &desc);
    if (!own && !born && !p->dense) tsh_parallelize(self, plan, 2);
    tsh_materialize(self);
    p->watched[0] = set(p, self, own ? "head.weight" : "wte.weight", 40);
    p->watched[1] = set(p, self, "head.bias", 41);
    if (own) set(p, self, "wte.weight", 42);
    if (!own && tsh_param(head, "weight") != tsh_param(wte, "weight")) return NULL;
    if (p->in[1]) x = tsh_add(x, tsh_forward(wte, p->in[1]));
    return tsh_forward(head, x);
}

/* -- prepare ---------------------------------------------------------------- */

static tsh_tensor *two_forward(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)user;
    return n == 2 ? tsh_mul(in[0], in[1]) : NULL;
}

/* A container of two inputs: the first as it comes, the second brought to its layout; the output to
 * another. */
static tsh_tensor *plan_prepare(probe *p) {
    const tsh_layout first = tsh_sharded(0), whole = tsh_replicated();
    const tsh_layout *wanted[2];
    const tsh_module_desc how = {two_forward, NULL};
    tsh_plan_rule plan[2] = {{.path = "", .style = TSH_PREPARE_INPUT, .input_count = 2},
                             {.path = "", .style = TSH_PREPARE_OUTPUT, .output = &whole}};
    tsh_module *self = container(p, &how);
    wanted[0] = NULL;
    wanted[1] = &first;
    plan[0].inputs = wanted;
    if (!p->dense) tsh_parallelize(self, plan, 2);
    return tsh_forward_n(self, p->in, 2);
}

/* Nested containers without a forward: PREPARE rules and styles meet on one layer. */
static tsh_tensor *plan_nested(probe *p) {
    const tsh_layout last = tsh_sharded(-1), whole = tsh_replicated();
    const tsh_plan_rule plan[] = {
        {.path = "**.inner.*", .style = TSH_COLWISE, .kind = "linear"},
        {.path = "outer", .style = TSH_PREPARE_INPUT, .input = &whole},
        {.path = "**.inner.only", .style = TSH_PREPARE_OUTPUT, .output = &last},
        {.path = "outer", .style = TSH_PREPARE_OUTPUT, .output = &whole},
    };
    tsh_module *self = container(p, NULL), *outer = tsh_add_module(self, "outer", NULL),
               *inner = tsh_add_module(outer, "inner", NULL);
    linear(inner, "only", tsh_size(p->in[0], -1), p->n);
    if (!p->dense) tsh_parallelize(self, plan, 4);
    tsh_materialize(self);
    p->watched[0] = set(p, inner, "only.weight", 40);
    p->watched[1] = set(p, inner, "only.bias", 41);
    return tsh_forward(self, p->in[0]);
}

/* convert_parallel_linear: every linear of a subtree that holds values, and nothing else. */
static tsh_tensor *plan_convert(probe *p) {
    const tsh_plan_rule rule = {
        .path = "**", .style = TSH_COLWISE, .kind = "linear", .gather_output = 1};
    const tsh_embedding_desc table = {.count = 5, .dim = p->n};
    tsh_module *self = container(p, NULL), *wte = tsh_add_embedding(self, "wte", &table);
    linear(self, "a", p->n, 6);
    linear(self, "b", 6, 3);
    tsh_materialize(self);
    set(p, self, "wte.weight", 44);
    set(p, self, "a.bias", 41);
    set(p, self, "b.bias", 43);
    p->watched[0] = set(p, self, "a.weight", 40);
    p->watched[1] = set(p, self, "b.weight", 42);
    if (!p->dense) tsh_parallelize(self, &rule, 1);
    if (tsh_layout_of(tsh_param(wte, "weight")).kind != TSH_REPLICATED) return NULL;
    return tsh_forward(self, p->in[0]);
}

/* ------------------------------------------------------------------- the table */

/* clang-format off */
#define PLAN(fn, arg, out, ...) TRIAL(plan_##fn, arg, out, ROUNDING, 0, __VA_ARGS__)
/* clang-format on */

static const trial plans[] = {
    PLAN(auto, "", "R", "2,n,4 R"),
    PLAN(auto, "late", "R", "n,4 R"),
    PLAN(auto, "late", "S(1)", "3,5n S(1)"),
    PLAN(auto, "", "S(1)", "2,4n S(1, unit 2)"),
    PLAN(classifier, "own col", "S(1)", "3,4 R"),
    PLAN(classifier, "own col gather", "R", "3,4 R"),
    PLAN(classifier, "own row", "R", "3,4 S(1)"),
    PLAN(classifier, "own row", "R", "3,4 R"),
    PLAN(classifier, "tied col", "S(1)", "3,4 R"),
    PLAN(classifier, "tied col born", "S(1)", "3,4 R", "%n 3 R"),
    PLAN(classifier, "tied col", "S(1)", "3,4 R", "%n 3 R"),
    PLAN(classifier, "tied row born", "R", "3,4 R", "%n 3 R"),
    PLAN(classifier, "tied row", "R", "3,4 R", "%n 3 R"),
    PLAN(prepare, "", "R", "3n,2 S(0)", "3n,2 R"),
    PLAN(prepare, "", "R", "n,5 S(0)", "n,5 S(1)"),
    PLAN(nested, "", "R", "3,4 S(1)"),
    PLAN(nested, "", "R", "3,5 R"),
    PLAN(convert, "", "R", "%5 4 R"),
};

static void every_plan_equals_the_dense_model(void **state) {
    static const int64_t length[] = {1, 3, 5, 10};
    (void)state;
    trials_prove(plans, COUNT(plans), length, COUNT(length));
}

/* -------------------------------------------------------------------- refusals */

typedef struct refusal {
    tsh_plan_rule rules[2];
    int count;
    const char *says[3];
} refusal;

static const tsh_layout somewhere = {TSH_SHARDED, 1, 1, {{0, 0}}};

static const refusal refusals[] = {
    {{{.path = "a", .style = TSH_SEQUENCE}}, 1, {"\"a\" matches no module that takes its style"}},
    {{{.path = "n", .style = TSH_AUTO}}, 1, {"\"n\" matches no module", "\"n\" is of kind"}},
    {{{.path = "a", .style = TSH_COLWISE, .kind = "embedding"}}, 1, {"\"a\" matches no module"}},
    {{{.path = "a", .style = TSH_PREPARE_OUTPUT}}, 1, {"rule 0", "\"a\"", "names no output"}},
    {{{.path = "a", .style = TSH_PREPARE_INPUT}}, 1, {"rule 0", "\"a\"", "names no input"}},
    {{{.path = "a", .style = (tsh_style)77}}, 1, {"rule 0", "does not exist"}},
    {{{.path = NULL}}, 1, {"rule 0", "has no path"}},
    {{{.path = "a", .style = TSH_AUTO, .unit = 2}},
     1,
     {"rule 0", "leaves the cut to the first input"}},
    {{{.path = "a", .style = TSH_COLWISE}, {.path = "?", .style = TSH_ROWWISE}},
     2,
     {"\"a\" and \"?\" both match \"a\""}},
    {{{.path = "a", .style = TSH_PREPARE_OUTPUT, .output = &somewhere},
      {.path = "**", .style = TSH_PREPARE_OUTPUT, .output = &somewhere}},
     2,
     {"\"a\" and \"**\" both match \"a\""}},
};

static int refuse(tsh_ctx *ctx, void *user) {
    const refusal *r = (const refusal *)user;
    const tsh_layer_norm_desc norm = {.dim = 4};
    tsh_module *root = tsh_root(ctx);
    int i;
    linear(root, "a", 4, 6);
    tsh_add_layer_norm(root, "n", &norm);
    CHECK(tsh_parallelize(root, r->rules, r->count) == TSH_ERR_ARGUMENT, "it is refused");
    for (i = 0; i < 3 && r->says[i]; i++)
        CHECK(strstr(tsh_last_error(ctx)->message, r->says[i]), "the sentence says \"%s\"",
              r->says[i]);
    CHECK(tsh_layout_of(tsh_param(root, "a.weight")).kind == TSH_REPLICATED, "nothing changed");
    return 0;
}

static void plans_that_do_not_fit_are_refused(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(refusals); i++) {
        refusal r = refusals[i];
        ranks_run(1, refuse, &r);
    }
}

/* Descriptions that contradict themselves or a tied weight. */
static int contradict(tsh_ctx *ctx, void *user) {
    const tsh_embedding_desc table = {.count = 6, .dim = 4, .style = TSH_ROWWISE};
    const tsh_linear_desc bare = {.in = 4, .out = 6, .bias = TSH_NO, .skip_bias_add = 1};
    tsh_classifier_desc head = {.in = 4, .classes = 6, .style = TSH_ROWWISE};
    tsh_module *root = tsh_root(ctx), *wte;
    (void)user;
    CHECK(!tsh_add_linear(root, "a", &bare), "a bias to leave that is not there");
    CHECK(strstr(tsh_last_error(ctx)->message, "leave its bias to the caller, and has none"), "a");
    tsh_clear_error(ctx);
    wte = tsh_add_embedding(root, "wte", &table);
    head.weight = tsh_param(wte, "weight");
    CHECK(!tsh_add_classifier(root, "c", &head), "row-wise with a weight that is cut by rows");
    CHECK(strstr(tsh_last_error(ctx)->message,
                 "\"c\" is rowwise, but its weight \"wte.weight\" is S(0)"),
          "c");
    tsh_clear_error(ctx);
    head.classes = 7;
    CHECK(!tsh_add_classifier(root, "d", &head), "a weight of another shape");
    CHECK(strstr(tsh_last_error(ctx)->message, "tsh_tie"), "d");
    tsh_clear_error(ctx);
    return 0;
}

static void descriptions_that_contradict_are_refused(void **state) {
    (void)state;
    ranks_run(1, contradict, NULL);
}

/* A module with another number of inputs than its rule prepares. */
static int miscount(tsh_ctx *ctx, void *user) {
    const tsh_layout whole = tsh_replicated();
    const tsh_layout *const wanted[2] = {&whole, &whole};
    const tsh_plan_rule rule = {
        .path = "a", .style = TSH_PREPARE_INPUT, .inputs = wanted, .input_count = 2};
    tsh_module *root = tsh_root(ctx);
    (void)user;
    linear(root, "a", 4, 6);
    CHECK(tsh_parallelize(root, &rule, 1) == TSH_OK, "plan");
    CHECK(!tsh_forward(tsh_find(root, "a"), tsh_ones(ctx, tsh_shape2(2, 4))), "one input");
    CHECK(strstr(tsh_last_error(ctx)->message,
                 "a: tsh_forward: got 1 inputs, the plan prepares 2"),
          "sentence");
    return 0;
}

static void inputs_are_counted(void **state) {
    (void)state;
    ranks_run(1, miscount, NULL);
}

/* ---------------------------------------------------- values that are laid anew */

/* Training goes on over new layouts, moments and all: losses are those of one layout. */
static int relaid(tsh_ctx *ctx, int dense, capture *got) {
    static const tsh_style styles[] = {TSH_COLWISE, TSH_PLAIN, TSH_ROWWISE, TSH_COLWISE};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .lr = 0.1};
    tsh_plan_rule rule = {.path = "a", .gather_output = 1};
    tsh_module *a = linear(tsh_root(ctx), "a", 5, 7);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &adam);
    tsh_tensor *x = tsh_requires_grad(tsh_keep(tsh_ones(ctx, tsh_shape2(3, 5))), 0), *y, *loss;
    int i;
    CHECK(tsh_step_end(ctx) == TSH_OK, "input");
    for (i = 0; i < COUNT(styles); i++) {
        rule.style = styles[i];
        rule.gather_output = styles[i] == TSH_COLWISE;
        if (!dense) CHECK(tsh_parallelize(tsh_root(ctx), &rule, 1) == TSH_OK, "plan %d", i);
        y = tsh_forward(a, x);
        loss = tsh_sum(tsh_mul(y, y), TSH_ALL, 0);
        if (capture_add(ctx, got, loss)) return 1;
        CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward %d", i);
        CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", i);
        tsh_zero_grads(tsh_root(ctx));
        CHECK(tsh_step_end(ctx) == TSH_OK, "end %d", i);
    }
    return 0;
}

static void moments_follow_their_parameter(void **state) {
    (void)state;
    same_prove(relaid, ROUNDING);
}

/* Nothing is laid anew, and nothing reset, while ops are recorded that use it; a tied weight under
 * TSH_AUTO is cut at once; a cut that is the same takes the new units. */
static int recorded(tsh_ctx *ctx, void *user) {
    const tsh_plan_rule column = {.path = "a", .style = TSH_COLWISE},
                        units = {.path = "b", .style = TSH_COLWISE, .unit = 4};
    const tsh_linear_desc born = {.in = 4, .out = 16, .style = TSH_COLWISE};
    const tsh_embedding_desc table = {.count = 6, .dim = 4};
    tsh_classifier_desc head = {.in = 4, .classes = 6, .style = TSH_AUTO};
    tsh_module *root = tsh_root(ctx), *a = linear(root, "a", 4, 6), *b, *last;
    tsh_tensor *y = tsh_forward(a, tsh_ones(ctx, tsh_shape2(2, 4)));
    (void)user;
    CHECK(tsh_parallelize(root, &column, 1) == TSH_ERR_STATE, "recorded");
    CHECK(strstr(tsh_last_error(ctx)->message, "\"a.weight\""), "named");
    tsh_clear_error(ctx);
    CHECK(tsh_reset_parameters(root) == TSH_ERR_STATE, "recorded");
    tsh_clear_error(ctx);
    CHECK(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)) == TSH_OK, "it is as it was");
    CHECK(tsh_step_end(ctx) == TSH_OK && tsh_parallelize(root, &column, 1) == TSH_OK,
          "between steps");
    b = tsh_add_linear(root, "b", &born);
    CHECK(tsh_parallelize(root, &units, 1) == TSH_OK, "the same cut in units");
    CHECK(tsh_layout_of(tsh_param(b, "weight")).segment[0].unit == 4, "the units are kept");
    head.weight = tsh_param(tsh_add_embedding(root, "wte", &table), "weight");
    last = tsh_add_classifier(root, "head", &head);
    CHECK(tsh_layout_of(tsh_param(last, "bias")).kind == TSH_SHARDED, "cut at once");
    CHECK_OK();
    return 0;
}

static void nothing_recorded_is_laid_anew(void **state) {
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], recorded, NULL);
}

/* What cannot be made leaves no trace: the name is free again. */
static int ghosts(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc odd = {.in = 4, .out = 6, .style = TSH_COLWISE, .unit = 4};
    const tsh_layer_norm_desc none = {.dim = -3}, four = {.dim = 4};
    tsh_module *root = tsh_root(ctx);
    (void)user;
    linear(root, "first", 4, 4);
    CHECK(!tsh_add_linear(root, "l", &odd), "6 features do not divide into 4s");
    tsh_clear_error(ctx);
    CHECK(!tsh_add_layer_norm(root, "n", &none), "a size below 0");
    tsh_clear_error(ctx);
    CHECK(tsh_child(root, 1) == NULL, "only the first is there");
    CHECK(linear(root, "l", 4, 6) && tsh_add_layer_norm(root, "n", &four), "the names are free");
    CHECK(tsh_child(root, 2) != NULL && !tsh_find(root, NULL), "and no name is not one");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_ARGUMENT, "it is told");
    tsh_clear_error(ctx);
    return 0;
}

static void what_cannot_be_made_leaves_no_trace(void **state) {
    (void)state;
    ranks_run(1, ghosts, NULL);
}

/* -------------------------------------------------------------------- reports */

/* What a report writes, into text. */
static int written(tsh_ctx *ctx, FILE *file, char *text, size_t size) {
    size_t n;
    rewind(file);
    n = fread(text, 1, size - 1, file);
    text[n] = '\0';
    (void)fclose(file);
    CHECK(n > 0, "something is written");
    return 0;
}

static int report(tsh_ctx *ctx, void *user) {
    const tsh_plan_rule plan[] = {{.path = "h.*", .style = TSH_COLWISE},
                                  {.path = "head", .style = TSH_ROWWISE}};
    const tsh_embedding_desc table = {.count = 7, .dim = 4};
    tsh_module *root = tsh_root(ctx), *h = tsh_add_module(root, "h", NULL);
    tsh_classifier_desc head = {.in = 4, .classes = 7, .bias = TSH_NO};
    const int first = tsh_tp(ctx)->rank == 0, p = tsh_tp(ctx)->size;
    char text[4096], line[128];
    FILE *file;
    (void)user;
    linear(h, "0", 4, 6);
    linear(h, "1", 6, 4);
    head.weight = tsh_param(tsh_add_embedding(root, "wte", &table), "weight");
    tsh_add_classifier(root, "head", &head);
    CHECK((file = tmpfile()) != NULL, "a file");
    CHECK(tsh_plan_report(root, plan, 2, file) == TSH_OK, "report");
    if (written(ctx, file, text, sizeof text)) return 1;
    CHECK(strstr(text, "h.*") && strstr(text, "2 matched: h.0 h.1\n"), "%s", text);
    CHECK(strstr(text, "rowwise") && strstr(text, "1 matched: head\n"), "%s", text);
    CHECK(tsh_layout_of(tsh_param(root, "h.0.weight")).kind == TSH_REPLICATED, "nothing changed");
    CHECK(tsh_parallelize(root, plan, 1) == TSH_OK, "half of the plan");
    CHECK((file = tmpfile()) != NULL, "a file");
    CHECK(tsh_summary(root, file) == TSH_OK, "summary");
    if (written(ctx, file, text, sizeof text)) return 1;
    CHECK(strstr(text, "head.weight") && strstr(text, "as wte.weight\n"), "tied: %s", text);
    CHECK(strstr(text, "wte.weight ") && strstr(text, "(7, 4)"), "global shape: %s", text);
    (void)snprintf(line, sizeof line, "(%d, 4)",
                   (int)tsh_local_size(tsh_param(root, "h.0.weight"), 0));
    CHECK(strstr(text, "S(0)") && strstr(text, line), "local shape %s: %s", line, text);
    (void)snprintf(line, sizeof line, "%d parameters; rank %d of %d holds ", 28 + 30 + 28,
                   tsh_tp(ctx)->rank, p);
    CHECK(strstr(text, line), "totals %s: %s", line, text);
    if (p == 2 && first) CHECK(strstr(text, "holds 57, "), "57 of them on the first: %s", text);
    CHECK((file = fopen("/dev/full", "w")) != NULL, "a full device");
    (void)setvbuf(file, NULL, _IONBF, 0);
    (void)tsh_barrier(tsh_world(ctx));
    CHECK(tsh_summary(root, file) == TSH_ERR_IO, "it is told");
    (void)fclose(file);
    return 0;
}

static void reports_say_what_is_there(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 3 && i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], report, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_plan_equals_the_dense_model),
        cmocka_unit_test(plans_that_do_not_fit_are_refused),
        cmocka_unit_test(descriptions_that_contradict_are_refused),
        cmocka_unit_test(inputs_are_counted),
        cmocka_unit_test(moments_follow_their_parameter),
        cmocka_unit_test(nothing_recorded_is_laid_anew),
        cmocka_unit_test(what_cannot_be_made_leaves_no_trace),
        cmocka_unit_test(reports_say_what_is_there),
    };
    return cmocka_run_group_tests_name("layer/plans", tests, NULL, NULL);
}
