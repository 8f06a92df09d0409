/* The vision transformer of examples/vit.h: trained as by examples/06_vit_train.c from the same
 * weights, it has PyTorch's loss at each of 500 steps, on 1, 2, 3 and 4 ranks. Saved there, and
 * loaded into another tree by another number of ranks, it reads as many digits. tests/golden/vit.py
 * wrote what is wanted, in this build's precision (in double, and under a sanitizer, which makes it
 * many times slower: on 1 and 3 ranks). */
/* build: double */
#include "../../examples/vit.h"
#include "../support/golden.h"
#include "../support/ranks.h"
#include "../support/files.h"

enum { BATCH = 64, STEPS = 500, IMAGES = 500 };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(TESTS_DOUBLE)
enum { SOME = 2 }; /* of the numbers of ranks, every second one */
#else
enum { SOME = 1 };
#endif

/* In float, sums in another order move the losses of these 500 steps by up to 2e-6; in double, what
 * is wanted is rounded to float. */
static const double TOLERANCE = sizeof(tsh_real) == 4 ? 1e-5 : 5e-7;

/* What PyTorch computes, and the largest difference from its losses. */
typedef struct outcome {
    const float *loss; /* (STEPS) */
    int64_t right;     /* of IMAGES */
    double worst;
} outcome;

static int count_right(tsh_ctx *ctx, tsh_module *model, int64_t *right) {
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(IMAGES, PATCHES, PIXELS),
                                   tsh_replicated());
    tsh_tensor *target = tsh_tensor_new(ctx, TSH_I64, tsh_shape1(IMAGES), tsh_replicated());
    const int64_t *truth = (const int64_t *)tsh_data(ctx, target);
    int64_t guess[IMAGES];
    CHECK_OK();
    make_images(123456789, IMAGES, tsh_data(ctx, x), tsh_data(ctx, target));
    tsh_train(model, 0);
    tsh_no_grad_begin(ctx);
    tsh_read(ctx, tsh_argmax(vit(model, x), -1, 0), TSH_GLOBAL, guess, sizeof guess);
    tsh_no_grad_end(ctx);
    *right = 0;
    for (int i = 0; i < IMAGES; i++) *right += guess[i] == truth[i];
    CHECK_OK();
    return 0;
}

static tsh_optim *make_optim(tsh_module *model) {
    tsh_optim_desc adamw = {.kind = TSH_ADAMW, .weight_decay = 0.01, .clip_norm = 1};
    tsh_optim *optim = tsh_optim_new(model, &adamw);
    tsh_optim_group(optim, "**.bias", 1, 0);
    tsh_optim_group(optim, "**.norm*.weight", 1, 0);
    return optim;
}

static int trains(tsh_ctx *ctx, void *user) {
    outcome *want = (outcome *)user;
    tsh_schedule cosine = {.kind = TSH_COSINE, .lr = 1e-3, .total = STEPS};
    tsh_module *model = tsh_add_module(tsh_root(ctx), "vit", NULL);
    tsh_optim *optim;
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape3(BATCH, PATCHES, PIXELS),
                                   tsh_replicated());
    tsh_tensor *target = tsh_tensor_new(ctx, TSH_I64, tsh_shape1(BATCH), tsh_replicated());
    double worst = 0;
    int64_t right;
    add_vit(model);
    CHECK(tsh_parallelize(model, plan, COUNT(plan)) == TSH_OK, "the plan");
    optim = make_optim(model);
    for (int step = 0; step < STEPS && tsh_ok(ctx); step++) {
        tsh_tensor *loss;
        double value;
        make_images((unsigned)step, BATCH, tsh_data(ctx, x), tsh_data(ctx, target));
        loss = tsh_cross_entropy(vit(model, x), target, NULL);
        tsh_backward(ctx, loss);
        tsh_optim_set_lr(optim, tsh_schedule_lr(&cosine, step));
        tsh_optim_step(optim);
        tsh_zero_grads(model);
        value = tsh_item(ctx, loss);
        worst = fmax(worst, fabs(value - (double)want->loss[step]));
        CHECK(fabs(value - (double)want->loss[step]) <= TOLERANCE, "step %d: loss %.9g, not %.9g",
              step, value, (double)want->loss[step]);
        tsh_step_end(ctx);
    }
    if (count_right(ctx, model, &right)) return 1;
    CHECK(right == want->right, "%d right, not %d", (int)right, (int)want->right);
    CHECK(tsh_save(tsh_root(ctx), files_path("vit"), NULL) == TSH_OK, "saved");
    if (tsh_world(ctx)->rank == 0) want->worst = worst;
    return 0;
}

static int predicts(tsh_ctx *ctx, void *user) {
    const tsh_file_desc from = {.prefix = "vit"};
    const outcome *want = (const outcome *)user;
    tsh_module *model = tsh_add_module(tsh_add_module(tsh_root(ctx), "app", NULL), "reader", NULL);
    int64_t right;
    add_vit(model);
    CHECK(tsh_parallelize(model, plan, COUNT(plan)) == TSH_OK, "the plan");
    CHECK(tsh_load_with(model, files_path("vit"), NULL, &from) == TSH_OK, "loaded");
    if (count_right(ctx, model, &right)) return 1;
    CHECK(right == want->right, "%d right, not %d", (int)right, (int)want->right);
    return 0;
}

static void a_vision_transformer_trains_as_in_pytorch(void **state) {
    golden_file file = golden_open("vit");
    const char *const real = sizeof(tsh_real) == 4 ? "f32" : "f64";
    const golden_tensor loss = golden_get(&file, real, "loss");
    outcome want;
    (void)state;
    (void)file_beside; /* for the programs */
    assert_int_equal(loss.count, STEPS);
    want.loss = (const float *)loss.data;
    want.right = *(const int64_t *)golden_get(&file, real, "right").data;
    for (int ranks = 1; ranks <= 4; ranks += SOME) {
        ranks_run(ranks, trains, &want);
        print_message("%d ranks: losses differ by %.1e, %d of %d right\n", ranks, want.worst,
                      (int)want.right, IMAGES);
        ranks_run(5 - ranks, predicts, &want);
    }
    golden_close(&file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_vision_transformer_trains_as_in_pytorch),
    };
    return cmocka_run_group_tests_name("layer/vit", tests, files_begin, files_end);
}
