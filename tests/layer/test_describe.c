/* What the library says about a model's ops: errors with the path of their module, and the tape as
 * text and as a graph; the first value that is not finite. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/small_gpt.h"

#define SAYS(sentence)                                                                             \
    CHECK(!strcmp(tsh_last_error(ctx)->message, sentence), "%s", tsh_last_error(ctx)->message)

/* ------------------------------------------------------- errors and their module */

/* What modules get as `user`, which is not const. */
static char name_b[] = "b", name_mlp[] = "mlp", name_root[] = "root", name_stubborn[] = "stubborn";

static tsh_tensor *add_one(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)n, (void)user;
    return tsh_add(in[0], tsh_ones(tsh_ctx_of(in[0]), tsh_shape1(3)));
}

static tsh_tensor *through(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)n;
    return tsh_forward(tsh_find(self, (const char *)user), in[0]);
}

static int forward_errors(tsh_ctx *ctx, void *user) {
    const tsh_module_desc outer = {through, name_mlp}, inner = {add_one, NULL};
    const tsh_linear_desc linear = {.in = 4, .out = 6};
    const tsh_layer_norm_desc norm = {.dim = 4};
    tsh_module *block = tsh_add_module(tsh_root(ctx), "h", &outer), *mlp, *lin, *ln;
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, 4)), *narrow = tsh_ones(ctx, tsh_shape2(2, 5));
    (void)user;
    mlp = tsh_add_module(block, "mlp", &inner);
    lin = tsh_add_linear(mlp, "c_fc", &linear);
    ln = tsh_add_layer_norm(mlp, "ln", &norm);
    CHECK(!tsh_forward(block, x), "an op of a container's forward");
    SAYS("h.mlp: tsh_add: shapes (2, 4) R and (3) R do not broadcast (4 against 3); counted from "
         "the last one, sizes must be equal or 1: tsh_reshape");
    tsh_clear_error(ctx);
    CHECK(!tsh_forward(lin, narrow), "a layer");
    SAYS("h.mlp.c_fc: tsh_linear: input has 5 features, weight \"h.mlp.c_fc.weight\" takes 4");
    tsh_clear_error(ctx);
    CHECK(!tsh_forward_residual(ln, &narrow, narrow) && !narrow, "a norm of a sum");
    SAYS("h.mlp.ln: tsh_layer_norm: input (2, 5) R, weight (4) R; weight and bias must have as "
         "many elements as the input has features (its last dimension)");
    tsh_clear_error(ctx);
    CHECK(!tsh_matmul(x, x), "an op outside of all modules");
    SAYS("tsh_matmul: (2, 4) R times (2, 4) R does not fit; takes (.., m, k) times (.., k, n) with "
         "leading sizes that broadcast: tsh_transpose, tsh_reshape");
    tsh_clear_error(ctx);
    CHECK(!tsh_forward(tsh_root(ctx), NULL), "an op of the root, whose path is empty");
    tsh_clear_error(ctx);
    tsh_checkpoint(lin, 1);
    CHECK(tsh_backward(ctx, tsh_sum(tsh_forward(lin, x), TSH_ALL, 0)) == TSH_OK, "after all that");
    CHECK(!tsh_slice(narrow = tsh_ones(ctx, tsh_shape1(2)), 0, 1, 2), "an op after a backward");
    SAYS("tsh_slice: 2 elements from 1 of dimension 0 are outside (2) R");
    return 0;
}

static void errors_name_the_module(void **state) {
    (void)state;
    ranks_run(1, forward_errors, NULL);
}

static int told_to_all(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc linear = {.in = 4, .out = 6};
    tsh_module *lin = tsh_add_linear(tsh_root(ctx), "up", &linear);
    const int rank = tsh_world(ctx)->rank;
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, rank == 1 ? 5 : 4));
    (void)user;
    (void)tsh_barrier(tsh_world(ctx)); /* all have opened their ctx */
    (void)tsh_forward(lin, x);
    while (tsh_ok(ctx)) /* tells the others, who may be in another barrier by then */
        if (tsh_barrier(tsh_world(ctx)) == TSH_ERR_TIMEOUT) break;
    CHECK(!tsh_ok(ctx) && tsh_last_error(ctx)->rank == 1, "rank 1 fails");
    if (rank == 1)
        SAYS("up: tsh_linear: input has 5 features, weight \"up.weight\" takes 4");
    else
        SAYS("rank 1: up: tsh_linear: input has 5 features, weight \"up.weight\" takes 4");
    return 0;
}

static void other_ranks_get_the_module_too(void **state) {
    (void)state;
    ranks_run(3, told_to_all, NULL);
}

/* An op whose backward refuses. */
static void same(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    (void)user, (void)n;
    memcpy(y, tsh_data(tsh_ctx_of(in[0]), in[0]), (size_t)tsh_numel(in[0]) * sizeof *y);
}

static void refuse(tsh_tensor *const *in, int n, const void *const *out,
                   const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    (void)n, (void)out, (void)grad_out, (void)grad_in;
    (void)tsh_fail(tsh_ctx_of(in[0]), TSH_ERR_ARGUMENT, "%s: no", (const char *)user);
}

static tsh_tensor *stubborn(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_custom_op_desc desc = {.name = "stubborn", .forward = same, .backward = refuse};
    (void)self, (void)n, (void)user;
    desc.user = name_stubborn;
    desc.out[0].shape = tsh_shape_of(in[0]);
    return tsh_custom_op(tsh_ctx_of(in[0]), in, 1, NULL, &desc);
}

static int backward_errors(tsh_ctx *ctx, void *user) {
    const tsh_module_desc refuses = {stubborn, NULL}, outer = {through, name_b};
    tsh_module *a = tsh_add_module(tsh_root(ctx), "a", &outer);
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(2), tsh_replicated()), *y;
    tsh_requires_grad(x, 1);
    tsh_checkpoint(tsh_add_module(a, "b", &refuses), *(int *)user);
    y = tsh_sum(tsh_neg(tsh_forward(a, x)), TSH_ALL, 0);
    CHECK(tsh_backward(ctx, y) == TSH_ERR_ARGUMENT, "its backward refuses");
    SAYS("a.b: stubborn: no");
    return 0;
}

static void backward_names_the_module(void **state) {
    int checkpoint;
    (void)state;
    for (checkpoint = 0; checkpoint < 2; checkpoint++) ranks_run(1, backward_errors, &checkpoint);
}

/* In a pipeline: the second stage's backward refuses, or its forward (user: 1). */
static tsh_tensor *stage_input(tsh_ctx *ctx, int micro_batch, void *user) {
    (void)micro_batch, (void)user;
    return tsh_ones(ctx, tsh_shape1(2));
}

static tsh_tensor *stage_loss(tsh_ctx *ctx, tsh_tensor *output, int micro_batch, void *user) {
    (void)ctx, (void)micro_batch, (void)user;
    return tsh_sum(output, TSH_ALL, 0);
}

static int stage_errors(tsh_ctx *ctx, void *user) {
    const int forward = *(int *)user, rank = tsh_world(ctx)->rank;
    const tsh_linear_desc linear = {.in = 2, .out = forward ? 4 : 2};
    const tsh_module_desc second = {forward ? add_one : stubborn, NULL};
    const tsh_pipeline_desc desc = {.micro_batches = 2, .input = stage_input, .loss = stage_loss};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipeline;
    tsh_add_linear(h, "0", &linear);
    tsh_add_module(h, "1", &second);
    pipeline = tsh_pipeline_new(h, &desc);
    CHECK(pipeline, "the pipeline");
    CHECK(tsh_pipeline_train(pipeline, NULL) != TSH_OK && tsh_last_error(ctx)->rank == 1, "fails");
    if (forward)
        CHECK(!strcmp(tsh_last_error(ctx)->message + (rank ? 0 : strlen("rank 1: ")),
                      "h.1: tsh_add: shapes (4) R and (3) R do not broadcast (4 against 3); "
                      "counted from the last one, sizes must be equal or 1: tsh_reshape"),
              "%s", tsh_last_error(ctx)->message);
    else
        CHECK(!strcmp(tsh_last_error(ctx)->message, rank ? "h.1: stubborn: no"
                                                         : "rank 1: h.1: stubborn: no"),
              "%s", tsh_last_error(ctx)->message);
    return 0;
}

static void stages_name_the_module(void **state) {
    const tsh_desc stages = {.tp = 1, .pp = 2};
    int forward;
    (void)state;
    for (forward = 0; forward < 2; forward++) ranks_run_with(2, &stages, stage_errors, &forward);
}

/* A sentence that leaves no room for all of the path keeps its own end. */
static tsh_tensor *talks(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)in, (void)n, (void)user;
    (void)tsh_fail(tsh_ctx_of(in[0]), TSH_ERR_STATE, "%0*d, the end", *(const int *)user, 0);
    (void)self;
    return NULL;
}

static int long_errors(tsh_ctx *ctx, void *user) {
    static int digits[] = {100, 340, 400, 460, 520};
    static char name[101];
    tsh_module *module = tsh_add_module(tsh_root(ctx), "first", NULL);
    int i, used = 0;
    (void)user;
    memset(name, 'm', 100);
    module = tsh_add_module(module, name, NULL);
    for (i = 0; i < COUNT(digits); i++) {
        const tsh_module_desc desc = {talks, &digits[i]};
        const char *message = tsh_last_error(ctx)->message;
        char last[8];
        (void)snprintf(last, sizeof last, "last%d", i);
        CHECK(!tsh_forward(tsh_add_module(module, last, &desc), tsh_ones(ctx, tsh_shape1(1))),
              "it refuses");
        CHECK(strlen(message) < TSH_MESSAGE_SIZE, "its size");
        if (digits[i] < 500) CHECK(strstr(message, "0, the end"), "%s", message);
        if (digits[i] < 460) CHECK(strstr(message, last), "%s", message);
        used += !strncmp(message, "first.", 6) + 10 * !strncmp(message, "...m", 4);
        tsh_clear_error(ctx);
    }
    CHECK(used == 22, "2 whole paths, 2 ends of one: %d", used);
    return 0;
}

static void a_path_gives_way_to_the_sentence(void **state) {
    (void)state;
    ranks_run(1, long_errors, NULL);
}

/* ------------------------------------------------------------ the tape as text */

/* What write puts into a file; its lines that hold `with`. */
static char *written(tsh_ctx *ctx, tsh_result (*write)(tsh_ctx *ctx, FILE *file),
                     const char *with) {
    enum { SIZE = 20000 };
    static char all[RANKS_MAX][SIZE];
    char line[1000], *text = all[tsh_world(ctx)->rank];
    FILE *file = tmpfile();
    size_t used = 0;
    text[0] = '\0';
    if (!file || write(ctx, file) != TSH_OK) return text;
    rewind(file);
    while (fgets(line, sizeof line, file) && used + strlen(line) < SIZE) {
        if (!strstr(line, with)) continue;
        (void)snprintf(text + used, SIZE - used, "%s", line);
        used += strlen(line);
    }
    (void)fclose(file);
    return text;
}

static void twice_slope(tsh_tensor *const *in, int n, const void *const *out,
                        const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    const tsh_real *dy = grad_out[0];
    int64_t i;
    (void)user, (void)n, (void)out;
    for (i = 0; grad_in[0] && i < tsh_numel(in[0]); i++) grad_in[0][i] = dy[i];
}

/* Every kind of input: of a leaf, of another op through a view, a missing bias, many, none. */
static tsh_tensor *small_net(tsh_ctx *ctx) {
    const tsh_linear_desc up = {.in = 2, .out = 4, .style = TSH_COLWISE},
                          down = {.in = 4, .out = 2, .style = TSH_ROWWISE, .bias = TSH_NO};
    tsh_custom_op_desc twice = {.name = "twice", .forward = same, .backward = twice_slope};
    tsh_module *net = tsh_root(ctx), *middle = tsh_add_module(net, "middle", NULL);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(3, 2)), *y, *parts[2];
    tsh_add_linear(net, "up", &up);
    tsh_add_linear(middle, "down", &down);
    y = tsh_forward(tsh_find(net, "middle"), tsh_relu(tsh_forward(tsh_find(net, "up"), x)));
    parts[0] = tsh_matmul(tsh_transpose(y, 0, 1), y);
    parts[1] = tsh_mul(y, x);
    twice.out[0].shape = tsh_shape_of(y);
    parts[1] = tsh_custom_op(ctx, &parts[1], 1, NULL, &twice);
    y = tsh_concat(parts, 2, 0);
    return tsh_mean(tsh_reshape(y, tsh_shape1(-1)), 0, 0);
}

static const char small_dump[] =
    "#0 up tsh_linear(x (3, 2) R, weight (4, 2) S(0), bias (4) S(0)) = (3, 4) S(1); "
    "saves x weight, 40 bytes\n"
    "#1 tsh_relu(#0: x (3, 4) S(1)) = (3, 4) S(1); saves output, 24 bytes\n"
    "#2 middle.down tsh_linear(#1: x (3, 4) S(1), weight (2, 4) S(1)) = (3, 2) R; "
    "saves x weight, 40 bytes\n"
    "#3 tsh_matmul(#2: a (2, 3) R, #2: b (3, 2) R) = (2, 2) R; saves a b, 48 bytes\n"
    "#4 tsh_mul(#2: a (3, 2) R, b (3, 2) R) = (3, 2) R; saves a b, 48 bytes\n"
    "#5 twice(#4: input (3, 2) R) = (3, 2) R; saves input0 output, 48 bytes\n"
    "#6 tsh_concat(#3: input (2, 2) R, #5: input (3, 2) R) = (5, 2) R\n"
    "#7 tsh_mean(#6: x (10) R) = () R\n";

static const char small_dot[] =
    "digraph tape {\n"
    "  node [shape=box, fontname=sans, fontsize=10];\n"
    "  edge [fontname=sans, fontsize=10];\n"
    "  n0 [label=\"tsh_scale\\n(2, 3) R\"];\n"
    "  n0_0 [shape=plain, label=\"x (2, 3) R\"];\n"
    "  n0_0 -> n0;\n"
    "  n1 [label=\"up\\ntsh_linear\\n(2, 4) S(1)\\nsaves x weight, 48 bytes\"];\n"
    "  n0 -> n1 [color=red, label=\"dx P\"];\n"
    "  n1_1 [shape=plain, label=\"weight (4, 3) S(0)\"];\n"
    "  n1_1 -> n1;\n"
    "  n1_2 [shape=plain, label=\"bias (4) S(0)\"];\n"
    "  n1_2 -> n1;\n"
    "}\n";

static int tapes(tsh_ctx *ctx, void *user) {
    tsh_tensor *loss;
    const char *text;
    (void)user;
    CHECK(!*written(ctx, tsh_tape_dump, ""), "nothing is recorded yet");
    loss = small_net(ctx);
    text = written(ctx, tsh_tape_dump, "");
    CHECK(!strcmp(text, small_dump), "%s", text);
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    CHECK(!*written(ctx, tsh_tape_dump, ""), "backward consumes the tape");
    return 0;
}

static int graphs(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc up = {.in = 3, .out = 4, .style = TSH_COLWISE};
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(2, 3), tsh_replicated());
    const char *text;
    (void)user;
    tsh_requires_grad(x, 1);
    CHECK(tsh_forward(tsh_add_linear(tsh_root(ctx), "up", &up), tsh_scale(x, 2)), "forward");
    text = written(ctx, tsh_tape_dot, "");
    CHECK(!strcmp(text, small_dot), "%s", text);
    return 0;
}

/* Puts one blank in place of every run of blanks and line ends. */
static void unfold(char *text) {
    char *to = text;
    const char *from;
    for (from = text; *from; from++)
        if (!strchr(" \n", *from) || (to > text && to[-1] != ' '))
            *to++ = *from == '\n' ? ' ' : *from;
    *to = '\0';
}

/* The block that examples/README.md shows. */
static int documented(tsh_ctx *ctx, void *user) {
    const gpt_form form = {.layers = 1};
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    tsh_module *gpt = gpt_add_form(ctx, &form);
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    char *text;
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "plan");
    CHECK(gpt_logits(gpt, ids), "forward");
    text = written(ctx, tsh_tape_dump, " h.0");
    unfold(text);
    CHECK(strlen(text) > 1000, "%s", text);
    if (tsh_tp(ctx)->rank == 0) CHECK(strstr((const char *)user, text), "the page lacks: %s", text);
    return 0;
}

static void the_page_shows_a_block(void **state) {
    static char page[100000], path[512];
    const char *here = __FILE__, *slash = strrchr(here, '/');
    FILE *file;
    (void)state;
    (void)snprintf(path, sizeof path, "%.*s../../examples/README.md",
                   slash ? (int)(slash - here + 1) : 0, here);
    file = fopen(path, "rb");
    if (!file) fail_msg("%s cannot be opened", path);
    page[fread(page, 1, sizeof page - 1, file)] = '\0';
    (void)fclose(file);
    unfold(page);
    ranks_run(2, documented, page);
}

/* What is wrong with the file, and with the ctx. */
static int refused(tsh_ctx *ctx, void *user) {
    FILE *full = fopen("/dev/full", "w");
    (void)user;
    (void)small_net(ctx);
    CHECK(tsh_tape_dump(NULL, stdout) == TSH_ERR_ARGUMENT, "no ctx");
    CHECK(tsh_tape_dot(ctx, NULL) == TSH_ERR_ARGUMENT, "no file");
    SAYS("tsh_tape_dot: the file is NULL");
    tsh_clear_error(ctx);
    if (!full) return 0; /* not Linux */
    CHECK(tsh_tape_dump(ctx, full) == TSH_ERR_IO, "a full disk");
    SAYS("tsh_tape_dump: writing failed: No space left on device");
    (void)fclose(full);
    return 0;
}

static void a_tape_is_written(void **state) {
    (void)state;
    ranks_run(2, tapes, NULL);
    ranks_run(2, graphs, NULL);
    ranks_run(1, refused, NULL);
}

/* ------------------------------------------------------------------ anomalies */

static tsh_tensor *root_of(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)n, (void)user;
    return tsh_sqrt(in[0]);
}

static tsh_tensor *log_of(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)self, (void)n, (void)user;
    return tsh_log(in[0]);
}

static tsh_tensor *given(tsh_ctx *ctx, float a, float b, float c) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(3), tsh_replicated());
    tsh_real *x = (tsh_real *)tsh_data(ctx, t);
    x[0] = a;
    x[1] = b;
    x[2] = c;
    return t;
}

static int forward_anomalies(tsh_ctx *ctx, void *user) {
    const tsh_module_desc logs = {log_of, NULL};
    tsh_module *log = tsh_add_module(tsh_root(ctx), "log", &logs);
    tsh_tensor *x = given(ctx, 1, 0, 2), *y = given(ctx, (float)NAN, -1, -INFINITY);
    tsh_custom_op_desc copy = {.name = "copy", .forward = same};
    (void)user;
    copy.out[0].shape = tsh_shape1(3);
    CHECK(tsh_forward(log, x), "it is off");
    tsh_detect_anomaly(ctx, 1);
    CHECK(tsh_relu(x), "all is finite");
    (void)tsh_forward(log, x);
    SAYS("log: tsh_log: the output (3) R has -infinity at (1); the inputs are finite");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_ANOMALY && !tsh_neg(x), "an error as others");
    tsh_clear_error(ctx);
    tsh_no_grad_begin(ctx);
    (void)tsh_add(x, y);
    SAYS("tsh_add: the output (3) R has NaN at (0); b has NaN at (0) already");
    tsh_clear_error(ctx);
    (void)tsh_scale(tsh_slice(y, 0, 2, 1), -1);
    SAYS("tsh_scale: the output (1) R has infinity at (0); x has -infinity at (0) already");
    tsh_clear_error(ctx);
    (void)tsh_custom_op(ctx, &y, 1, NULL, &copy);
    SAYS("copy: the output (3) R has NaN at (0); input has NaN at (0) already");
    tsh_clear_error(ctx);
    tsh_no_grad_end(ctx);
    tsh_detect_anomaly(ctx, 0);
    CHECK(tsh_add(x, y), "it is off again");
    CHECK_OK();
    return 0;
}

/* The gradient of sqrt is infinite at 0; user: whether the module is a checkpoint. */
static int backward_anomalies(tsh_ctx *ctx, void *user) {
    const tsh_module_desc roots = {root_of, NULL}, outer = {through, name_root};
    tsh_module *net = tsh_add_module(tsh_root(ctx), "net", &outer);
    tsh_tensor *x = given(ctx, 1, 0, 2);
    tsh_checkpoint(tsh_add_module(net, "root", &roots), *(int *)user);
    tsh_requires_grad(x, 1);
    tsh_detect_anomaly(ctx, 1);
    x = tsh_sum(tsh_forward(net, tsh_neg(tsh_neg(x))), TSH_ALL, 0);
    CHECK_OK();
    CHECK(tsh_backward(ctx, x) == TSH_ERR_ANOMALY, "backward");
    SAYS("net.root: tsh_sqrt: the gradient of x (3) R has infinity at (1)");
    CHECK(tsh_last_error(ctx)->rank == 0, "the rank");
    return 0;
}

/* On two ranks only rank 1 sees it; and a sum over ranks that no rank's part shows. */
static int anomalies_of_ranks(tsh_ctx *ctx, void *user) {
    const tsh_linear_desc linear = {.in = 1, .out = 2, .style = TSH_COLWISE, .bias = TSH_NO};
    tsh_module *up = tsh_add_linear(tsh_root(ctx), "up", &linear);
    const int rank = tsh_world(ctx)->rank, sums = *(int *)user;
    tsh_tensor *x = sums ? given(ctx, 0, 0, 0) : given(ctx, 1, 2, 3), *y;
    tsh_real *w = (tsh_real *)tsh_data(ctx, tsh_param(up, "weight"));
    w[0] = sums ? 3e38f : (float)-rank;
    tsh_requires_grad(x, 1);
    tsh_detect_anomaly(ctx, 1);
    (void)tsh_barrier(tsh_world(ctx));
    y = tsh_forward(up, tsh_reshape(tsh_scale(x, 0.25), tsh_shape2(3, 1)));
    y = sums ? y : tsh_log(tsh_add_scalar(y, 0.25));
    y = tsh_sum(tsh_redistribute(y, tsh_replicated()), TSH_ALL, 0);
    CHECK(!tsh_ok(ctx) || tsh_backward(ctx, y) != TSH_OK, "on both ranks");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_ANOMALY, "the code");
    if (sums) {
        CHECK(strstr(tsh_last_error(ctx)->message,
                     "tsh_scale: the sum of the gradients of the output (3) R has infinity at (0)"),
              "%s", tsh_last_error(ctx)->message);
        return 0;
    }
    CHECK(tsh_last_error(ctx)->rank == 1, "the rank");
    if (rank)
        SAYS("tsh_log: the output (3, 2) S(1) has -infinity at (0, 1); the inputs are finite");
    else
        SAYS("rank 1: tsh_log: the output (3, 2) S(1) has -infinity at (0, 1); the inputs are "
             "finite");
    return 0;
}

static void anomalies_are_found(void **state) {
    int i;
    (void)state;
    ranks_run(1, forward_anomalies, NULL);
    for (i = 0; i < 2; i++) ranks_run(1, backward_anomalies, &i);
    for (i = 0; i < 2; i++) ranks_run(2, anomalies_of_ranks, &i);
}

/* A model that is sound: no error, and the same losses. */
typedef struct sound {
    int detect;
    double loss[3];
} sound;

static int train_soundly(tsh_ctx *ctx, void *user) {
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.01};
    sound *s = (sound *)user;
    tsh_module *gpt = gpt_add(ctx);
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_tensor *targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_optim *optim;
    int i;
    CHECK(tsh_parallelize(gpt, gpt_sequence_plan, GPT_SEQUENCE_RULES) == TSH_OK, "plan");
    tsh_checkpoint(tsh_find(gpt, "h.1"), 1);
    optim = tsh_optim_new(gpt, &adamw);
    tsh_detect_anomaly(ctx, s->detect);
    for (i = 0; i < COUNT(s->loss); i++) {
        const double loss = gpt_step(ctx, optim, ids, targets, i);
        if (tsh_world(ctx)->rank == 0) s->loss[i] = loss;
    }
    CHECK_OK();
    return 0;
}

static void looking_changes_nothing(void **state) {
    sound with = {.detect = 1}, without = {.detect = 0};
    (void)state;
    ranks_run(3, train_soundly, &with);
    ranks_run(3, train_soundly, &without);
    assert_memory_equal(with.loss, without.loss, sizeof with.loss);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_name_the_module),
        cmocka_unit_test(other_ranks_get_the_module_too),
        cmocka_unit_test(backward_names_the_module),
        cmocka_unit_test(stages_name_the_module),
        cmocka_unit_test(a_path_gives_way_to_the_sentence),
        cmocka_unit_test(a_tape_is_written),
        cmocka_unit_test(the_page_shows_a_block),
        cmocka_unit_test(anomalies_are_found),
        cmocka_unit_test(looking_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
