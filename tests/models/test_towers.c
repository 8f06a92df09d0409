/* A ranking model with a tower, embedding and MLP, for users and one for items: of all items in a
 * batch, a user's own is to score highest (Yi et al. 2019). It trains as in PyTorch at 1, 2 and 3
 * ranks: one embedding is sharded by features, the other by rows, and the vectors of which products
 * and cosines are computed are sharded by features. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "models.h"

enum { PAIRS = 9, USERS = 10, ITEMS = 11, WIDTH = 8, HIDDEN = 7, OUT = 5 };

static const tsh_layout features = {TSH_SHARDED, -1, 0, {{0, 0}}};
static const tsh_plan_rule plan[] = {
    {.path = "user.embed", .style = TSH_COLWISE, .output = &features},
    {.path = "item.embed", .style = TSH_ROWWISE},
    {.path = "*.up", .style = TSH_ROWWISE},
    {.path = "*.down", .style = TSH_COLWISE}};

static void add_tower(tsh_module *root, const char *name, int64_t count) {
    tsh_module *self = tsh_add_module(root, name, NULL);
    tsh_add_embedding(self, "embed", &(tsh_embedding_desc){.count = count, .dim = WIDTH});
    tsh_add_linear(self, "up", &(tsh_linear_desc){.in = WIDTH, .out = HIDDEN});
    tsh_add_linear(self, "down", &(tsh_linear_desc){.in = HIDDEN, .out = OUT});
}

static void build(tsh_module *root) {
    add_tower(root, "user", USERS);
    add_tower(root, "item", ITEMS);
}

static tsh_tensor *vectors(tsh_module *tower, tsh_tensor *ids) {
    tsh_tensor *x = models_call(tower, "up", models_call(tower, "embed", ids));
    return models_call(tower, "down", tsh_relu(x));
}

/* Cosines, divided by a temperature, go into a softmax over the items of the batch; products into
 * the binary cross-entropy of each pair. */
static tsh_tensor *loss(tsh_module *root, int step) {
    tsh_ctx *ctx = tsh_module_ctx(root);
    tsh_tensor *user = models_below(ctx, USERS, "user", step, tsh_shape1(PAIRS)), *item;
    tsh_tensor *shift = models_below(ctx, 3, "shift", step, tsh_shape1(PAIRS)), *cosine, *product;
    const int64_t *id = (const int64_t *)tsh_data(ctx, user);
    const int64_t *by = (const int64_t *)tsh_data(ctx, shift);
    int64_t items[PAIRS];
    tsh_real pair[PAIRS * PAIRS] = {0};
    for (int i = 0; i < PAIRS; i++) {
        items[i] = (id[i] + by[i]) % ITEMS;
        pair[i * PAIRS + i] = 1;
    }
    user = vectors(tsh_find(root, "user"), user);
    item = vectors(tsh_find(root, "item"), tsh_from(ctx, items, tsh_shape1(PAIRS), TSH_I64));
    cosine = tsh_cosine_similarity(tsh_unsqueeze(user, 1), tsh_unsqueeze(item, 0), -1, 0);
    cosine = tsh_cross_entropy(tsh_scale(cosine, 1 / 0.2), tsh_arange(ctx, TSH_I64, 0, PAIRS, 1),
                               NULL);
    product = tsh_full_tensor(tsh_einsum("ud,id->ui", user, item));
    product = tsh_binary_cross_entropy_with_logits(
        product, tsh_from(ctx, pair, tsh_shape2(PAIRS, PAIRS), TSH_REAL), NULL);
    return tsh_add(cosine, product);
}

static const tsh_optim_desc optim = {.kind = TSH_ADAMW, .lr = 1e-2, .weight_decay = 0.01};

static void two_towers_train_as_in_pytorch(void **state) {
    model m = {"towers", build, loss, plan, COUNT(plan), optim};
    (void)state;
    models_prove(&m, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(two_towers_train_as_in_pytorch)};
    return cmocka_run_group_tests_name("towers", tests, NULL, NULL);
}
