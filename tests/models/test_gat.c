/* A graph attention network (Velickovic et al. 2018) that classifies the nodes of a graph: two
 * layers with a softmax over the edges into each node. It trains as in PyTorch at 1, 2 and 3 ranks:
 * the heads of the first layer are sharded; the linear layer of the second is row-parallel. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "models.h"

enum { NODES = 11, EDGES = 40, IN = 5, HEADS = 3, OUT = 4, CLASSES = 4 };

static const tsh_plan_rule plan[] = {{.path = "first.linear", .style = TSH_COLWISE, .unit = OUT},
                                     {.path = "first.bias", .style = TSH_ROWWISE, .unit = OUT},
                                     {.path = "first.src", .style = TSH_ROWWISE},
                                     {.path = "first.dst", .style = TSH_ROWWISE},
                                     {.path = "second.linear", .style = TSH_ROWWISE, .unit = OUT}};

/* The node at one end of each edge. The first edges lead from each node to itself. */
static tsh_tensor *nodes(tsh_ctx *ctx, const char *end) {
    tsh_tensor *part[2] = {tsh_arange(ctx, TSH_I64, 0, NODES, 1),
                           models_below(ctx, NODES, end, 0, tsh_shape1(EDGES - NODES))};
    return tsh_concat(part, 2, 0);
}

/* Adds up the rows of x (EDGES, ..) whose edges lead to the same node. */
static tsh_tensor *sum_by_node(tsh_tensor *x, tsh_tensor *node) {
    tsh_shape shape = tsh_shape_of(x);
    while (tsh_ndim(node) < shape.ndim) node = tsh_unsqueeze(node, -1);
    node = tsh_redistribute(tsh_expand(node, shape), tsh_layout_of(x));
    shape.dim[0] = NODES;
    return tsh_scatter_add(tsh_redistribute(tsh_zeros(tsh_ctx_of(x), shape), tsh_layout_of(x)), 0,
                           node, x);
}

/* x (NODES, in) -> (NODES, heads out); the parameters src and dst are (heads, out). */
static tsh_tensor *attend(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *src = nodes(tsh_module_ctx(self), "src"), *dst = nodes(tsh_module_ctx(self), "dst");
    tsh_tensor *p = tsh_param(self, "src"), *q = tsh_param(self, "dst"), *a;
    tsh_tensor *h = tsh_reshape(models_call(self, "linear", in[0]),
                                tsh_shape3(NODES, tsh_size(p, 0), tsh_size(p, 1)));
    (void)n, (void)user;
    a = tsh_add(tsh_index_select(tsh_sum(tsh_mul(h, p), -1, 0), 0, src),
                tsh_index_select(tsh_sum(tsh_mul(h, q), -1, 0), 0, dst));
    a = tsh_exp(tsh_leaky_relu(a, 0.2)); /* (EDGES, heads) */
    a = tsh_div(a, tsh_index_select(sum_by_node(a, dst), 0, dst));
    h = sum_by_node(tsh_mul(tsh_index_select(h, 0, src), tsh_unsqueeze(a, -1)), dst);
    return tsh_add(tsh_reshape(h, tsh_shape2(NODES, -1)), tsh_param(self, "bias"));
}

static void add_layer(tsh_module *root, const char *name, int64_t in, int64_t heads, int64_t out) {
    tsh_module *self = tsh_add_module(root, name, &(tsh_module_desc){.forward = attend});
    tsh_add_linear(self, "linear",
                   &(tsh_linear_desc){.in = in, .out = heads * out, .bias = TSH_NO});
    tsh_add_param(self, "src", tsh_shape2(heads, out), NULL);
    tsh_add_param(self, "dst", tsh_shape2(heads, out), NULL);
    tsh_add_param(self, "bias", tsh_shape1(heads * out), NULL);
}

static void build(tsh_module *root) {
    add_layer(root, "first", IN, HEADS, OUT);
    add_layer(root, "second", HEADS * OUT, 1, CLASSES);
}

/* The class of a node follows from its features; that of every fifth node is not known. */
static tsh_tensor *loss(tsh_module *root, int step) {
    tsh_ctx *ctx = tsh_module_ctx(root);
    tsh_tensor *y = models_data(ctx, "x", step, tsh_shape2(NODES, IN));
    const tsh_real *x = (const tsh_real *)tsh_data(ctx, y);
    int64_t target[NODES];
    for (int i = 0; i < NODES; i++)
        target[i] = i % 5 == 4 ? -100 : 2 * (x[i * IN] > 0) + (x[i * IN + 1] > 0);
    y = models_call(root, "second", tsh_elu(models_call(root, "first", y), 0));
    return tsh_nll_loss(tsh_log_softmax(y, -1), tsh_from(ctx, target, tsh_shape1(NODES), TSH_I64),
                        NULL);
}

static const tsh_optim_desc optim = {.kind = TSH_SGD, .lr = 0.1, .momentum = 0.9};

static void a_gat_trains_as_in_pytorch(void **state) {
    model m = {"gat", build, loss, plan, COUNT(plan), optim};
    (void)state;
    models_prove(&m, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_gat_trains_as_in_pytorch)};
    return cmocka_run_group_tests_name("gat", tests, NULL, NULL);
}
