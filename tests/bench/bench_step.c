/* Training steps of examples/gpt.c, to be compared: takes its flags, starts the ranks, then answers
 * commands, one line each, until its input ends:
 *
 *     step 0 N      microseconds of one of N training steps
 *     comm 0 N      of these, what rank 0 spends in collectives and waits for them
 *     held 0 N      as step, where no gradient travels before backward has ended
 *     held_comm 0 N as comm, likewise
 *     memory 0 1    the most memory that the process has had, in KiB
 *     moments 0 1   bytes of the optimiser's moments on rank 0
 *
 * --pure, besides the flags of gpt.c: gradients and moments are bf16, too, and no exact
 * weights are kept.
 *
 * Between commands the ranks sleep. With --backend tcp they are processes, over 127.0.0.1. */
#define _DEFAULT_SOURCE /* ru_maxrss */
#define main            gpt_main
int gpt_main(int argc, char **argv);
#include "../../examples/gpt.c"
#undef main
#include <sys/resource.h> /* getrusage */
#ifdef GPT_TCP
#include <arpa/inet.h>  /* htonl, ntohs */
#include <sys/socket.h> /* socket, bind, listen */
#include <sys/wait.h>   /* waitpid */
#endif

enum { NONE, STEP, COMM, HELD, HELD_COMM, MEMORY, MOMENTS, COMMANDS };

/* Rank 0's next command, known to all. */
static int next_command(gpt_trainer *t, int64_t *steps) {
    static const char *const names[COMMANDS] = {"",          "step",   "comm",   "held",
                                                "held_comm", "memory", "moments"};
    char name[16] = "", line[64];
    int64_t told[2] = {NONE, 0};
    long count = 0;
    if (is_first(t) && fgets(line, sizeof line, stdin) != NULL &&
        sscanf(line, "%15s 0 %ld", name, &count) == 2 && count > 0)
        for (int i = STEP; i < COMMANDS; i++)
            if (strcmp(name, names[i]) == 0) told[0] = i;
    told[1] = count;
    tsh_broadcast(tsh_world(t->ctx), told, 2, TSH_I64, 0);
    *steps = told[1];
    return (int)told[0];
}

static int refuse_text(const char *text, size_t size, void *user) {
    (void)user, (void)text, (void)size;
    return 0;
}

/* Microseconds of one step; with `comm` of its collectives, by a trace that nobody writes. */
static double time_of(gpt_trainer *t, int64_t steps, int comm, int64_t *step) {
    double start = report_now(), microseconds = 0;
    if (comm) tsh_trace_begin(t->ctx, &(tsh_trace_desc){.print = refuse_text});
    for (int64_t i = 0; i < steps; i++) train_step(t, (*step)++);
    if (!comm) return 1e6 * (report_now() - start) / (double)steps;
    for (const tshi_event *e = t->ctx->trace != NULL ? t->ctx->trace->first : NULL; e; e = e->next)
        if (e->kind == TSHI_TRACE_COLL) microseconds += 1e-3 * (double)(e->end - e->begin);
    tshi_trace_drop(t->ctx);
    return microseconds / (double)steps;
}

static int serve(tsh_ctx *ctx, void *user) {
    gpt_job *job = (gpt_job *)user;
    gpt_trainer t;
    int64_t steps, step = 0;
    int command;
    make_trainer(&t, ctx, job);
    make_pipelines(&t);
    while (tsh_ok(ctx) && (command = next_command(&t, &steps)) != NONE) {
        double answer;
        if (command == MEMORY) {
            struct rusage used;
            getrusage(RUSAGE_SELF, &used);
            answer = (double)used.ru_maxrss;
        } else if (command == MOMENTS) {
            answer = (double)tsh_mem_stats(ctx).now[TSH_MEM_OPTIMISER];
        } else {
            ctx->buckets.hold = command == HELD || command == HELD_COMM;
            answer = time_of(&t, steps, command == COMM || command == HELD_COMM, &step);
        }
        if (is_first(&t) && tsh_ok(ctx)) printf("%.0f\n", answer);
        fflush(stdout);
    }
    return !tsh_ok(ctx);
}

#ifdef GPT_TCP
static int one_process(gpt_job *job, tsh_desc *desc, int rank, int listener, int port) {
    tsh_error why;
    tsh_uv_desc uv = {.rank = rank, .size = (int)job->set.ranks, .host = "127.0.0.1"};
    uv.port = port;
    uv.error = &why;
    if (rank == 0) uv.listener = listener;
    if (tsh_uv_open(&uv, &desc->comm) != TSH_OK) return refuse("%s", why.message);
    return tsh_run(desc, serve, job);
}

/* Every rank a process; this one is rank 0. */
static int run_processes(gpt_job *job, tsh_desc *desc) {
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t size = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0), failed, status = 0;
    pid_t child[MAX_RANKS] = {0};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (listener < 0 || bind(listener, (struct sockaddr *)&at, size) != 0 ||
        listen(listener, MAX_RANKS) != 0 ||
        getsockname(listener, (struct sockaddr *)&at, &size) != 0)
        return refuse("no socket: %s", strerror(errno));
    for (int r = 1; r < job->set.ranks; r++) {
        child[r] = fork();
        if (child[r] == 0) {
            close(listener);
            _exit(one_process(job, desc, r, listener, ntohs(at.sin_port)));
        }
    }
    failed = one_process(job, desc, 0, listener, ntohs(at.sin_port));
    for (int r = 1; r < job->set.ranks; r++) {
        waitpid(child[r], &status, 0);
        failed |= status != 0;
    }
    return failed;
}
#else
static int run_processes(gpt_job *job, tsh_desc *desc) {
    (void)job, (void)desc;
    return refuse("built without TCP");
}
#endif

int main(int argc, char **argv) {
    gpt_job job = {.set = defaults};
    gpt_flag flags[FLAGS];
    int help = 0;
    make_flags(flags, &job.set, &help);
    for (int i = 1; i < argc; i++) { /* no flag of gpt.c: taken out */
        if (strcmp(argv[i], "--pure") != 0) continue;
        job.set.pure = 1;
        memmove(argv + i, argv + i + 1, (size_t)(argc - i) * sizeof *argv);
        argc--;
    }
    int failed = parse_flags(flags, argc, argv);
    if (!failed) failed = check_backend(&job.set);
    if (!failed) failed = check_gemm(&job.set);
    if (!failed) failed = check_settings(&job.set, tsh_threads_cores());
    if (!failed) failed = load_text(&job.text, &job.set);
    if (failed) return failed;
    tsh_desc desc = {.tp = (int)job.set.tp,
                     .pp = (int)job.set.pp,
                     .threads = (int)job.set.threads,
                     .seed = (uint64_t)job.set.seed,
                     .dtype = dtype_of(&job.set),
                     .logger.log = tsh_log_stderr};
    failed = job.set.joins ? run_processes(&job, &desc)
                           : tsh_threads_run((int)job.set.ranks, &desc, serve, &job);
    return failed;
}
