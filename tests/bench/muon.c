/* Trains examples/gpt.c's model with Muon, to be compared with PyTorch by muon.py:
 *
 *     muon FOLDER init [flags of gpt.c]        writes weights.safetensors to the folder, and
 *                                              batches.bin: i32, (steps, batch, context + 1)
 *     muon FOLDER muon|adamw [flags of gpt.c]  begins with these weights
 *
 * Prints the loss of every step, and last the mean over the validation text. Muon ("init", too)
 * updates the matrices of the blocks, AdamW all else, both at a constant rate, --lr, with a weight
 * decay of 0.1 for tables and matrices; the gradient is clipped to norm 1. */
#define main gpt_main
int gpt_main(int argc, char **argv);
#include "../../examples/gpt.c"
#undef main

static const char *folder, *kind;
static const char *const matrices[] = {"**.c_attn.weight", "**.c_proj.weight", "**.c_fc.weight"};

static int save_batches(gpt_trainer *t) {
    const int64_t context = t->set->context;
    char path[512];
    FILE *file;
    (void)snprintf(path, sizeof path, "%s/batches.bin", folder);
    file = fopen(path, "wb");
    if (file == NULL) return 1;
    for (int64_t s = 1; s <= t->set->steps; s++) {
        const int32_t *ids = (const int32_t *)tsh_data(t->ctx, t->ids);
        const int32_t *targets = (const int32_t *)tsh_data(t->ctx, t->targets);
        load_train_batch(t, s);
        for (int64_t row = 0; row < t->rows; row++) {
            fwrite(ids + row * context, sizeof *ids, (size_t)context, file);
            fwrite(targets + (row + 1) * context - 1, sizeof *ids, 1, file);
        }
    }
    return fclose(file);
}

static void make_muon(gpt_trainer *t) {
    const int muon = strcmp(kind, "adamw") != 0;
    tsh_optim_desc adamw = {.kind = TSH_ADAMW,
                            .lr = t->set->lr,
                            .beta1 = 0.9,
                            .beta2 = 0.99,
                            .weight_decay = 0.1};
    tsh_optim_desc desc = adamw;
    tsh_optim_free(t->optim);
    desc.clip_norm = 1;
    desc.zero = t->set->zero;
    t->optim = tsh_optim_new(t->gpt, &desc);
    desc = (tsh_optim_desc){.kind = TSH_MUON, .lr = t->set->lr, .weight_decay = 0.1};
    for (int i = 0; i < 3 && muon; i++) tsh_optim_group_with(t->optim, matrices[i], &desc);
    tsh_optim_group(t->optim, "**.bias", 1, 0);
    tsh_optim_group(t->optim, "**.ln_?.weight", 1, 0);
    t->schedule = (tsh_schedule){.kind = TSH_CONSTANT, .lr = t->set->lr};
}

static int train_with(tsh_ctx *ctx, void *user) {
    gpt_trainer t;
    char path[512];
    double value;
    make_trainer(&t, ctx, (gpt_job *)user);
    make_muon(&t);
    make_pipelines(&t);
    (void)snprintf(path, sizeof path, "%s/weights.safetensors", folder);
    if (strcmp(kind, "init") != 0)
        (void)tsh_load(t.gpt, path, NULL);
    else if (tsh_save(t.gpt, path, NULL) == TSH_OK && save_batches(&t) != 0)
        return 1;
    for (int64_t s = 1; s <= t.set->steps && tsh_ok(ctx); s++) {
        value = train_step(&t, s);
        if (is_first(&t)) printf("%.9g\n", value);
    }
    value = evaluate(&t);
    if (is_first(&t)) printf("%.9g\n", value);
    return !tsh_ok(ctx);
}

int main(int argc, char **argv) {
    gpt_job job = {.set = defaults};
    gpt_flag flags[FLAGS];
    int help = 0, failed;
    if (argc < 3) return refuse("usage: muon FOLDER init|muon|adamw [flags of gpt.c]");
    folder = argv[1];
    kind = argv[2];
    make_flags(flags, &job.set, &help);
    failed = parse_flags(flags, argc - 2, argv + 2);
    if (!failed) failed = check_settings(&job.set, tsh_threads_cores());
    if (!failed) failed = load_text(&job.text, &job.set);
    if (failed) return failed;
    return tsh_threads_run((int)job.set.ranks,
                           &(tsh_desc){.tp = (int)job.set.tp,
                                       .seed = (uint64_t)job.set.seed,
                                       .logger.log = tsh_log_stderr},
                           train_with, &job);
}
