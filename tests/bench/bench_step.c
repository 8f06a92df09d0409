/* Training steps of examples/gpt.c, to be compared: takes its flags, starts the ranks, then answers
 * commands, one line each, until its input ends:
 *
 *     step 0 N      microseconds of one of N training steps
 *     memory 0 1    the most memory that the process has had, in KiB
 *
 * Between commands the ranks sleep. */
#define _DEFAULT_SOURCE /* ru_maxrss */
#define main gpt_main
int gpt_main(int argc, char **argv);
#include "../../examples/gpt.c"
#undef main
#include <sys/resource.h> /* getrusage */

/* Rank 0's next command, known to all; 0: there is none. */
static int64_t next_command(gpt_trainer *t) {
    char name[16] = "", line[64];
    int64_t command = 0;
    long steps = 0;
    if (is_first(t) && fgets(line, sizeof line, stdin) != NULL &&
        sscanf(line, "%15s 0 %ld", name, &steps) == 2 && steps > 0)
        command = strcmp(name, "memory") == 0 ? -1 : steps;
    tsh_broadcast(tsh_world(t->ctx), &command, 1, TSH_I64, 0);
    return command;
}

static int serve(tsh_ctx *ctx, void *user) {
    gpt_job *job = (gpt_job *)user;
    gpt_trainer t;
    int64_t command, step = 0;
    make_trainer(&t, ctx, job);
    while (tsh_ok(ctx) && (command = next_command(&t)) != 0) {
        double answer, start = report_now();
        for (int64_t i = 0; i < command; i++) train_step(&t, step++);
        answer = 1e6 * (report_now() - start) / (double)command;
        if (command < 0) {
            struct rusage used;
            getrusage(RUSAGE_SELF, &used);
            answer = (double)used.ru_maxrss;
        }
        if (is_first(&t) && tsh_ok(ctx)) printf("%.0f\n", answer);
        fflush(stdout);
    }
    if (!tsh_ok(ctx)) keep_error(job, tsh_last_error(ctx));
    return !tsh_ok(ctx);
}

int main(int argc, char **argv) {
    gpt_job job = {.set = defaults};
    gpt_flag flags[FLAGS];
    int help = 0;
    make_flags(flags, &job.set, &help);
    int failed = parse_flags(flags, argc, argv);
    if (!failed) failed = check_gemm(&job.set);
    if (!failed) failed = check_settings(&job.set);
    if (!failed) failed = load_text(&job.text, &job.set);
    if (failed) return failed;
    tsh_desc desc = {.tp = (int)job.set.tp, .seed = (uint64_t)job.set.seed};
    failed = tsh_threads_run((int)job.set.ranks, &desc, serve, &job);
    if (failed) refuse("%s", job.error);
    return failed;
}
