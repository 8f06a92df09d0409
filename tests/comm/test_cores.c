/* Cores: how many a process may use, by its affinity, by which hyperthreads belong together and by
 * the quota of its control groups; binding the threads of ranks; how examples choose ranks and
 * threads. */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../../examples/cores.h"
#include "../support/ranks.h"
#include "../support/logs.h"
#include "../support/skip.h"
#include "../support/files.h"
#include "../support/unit.h"

/* ------------------------------------------------------------------ choosing */

/* cores.h says that its model has measured times of GPT-2 124M: the order of these is the same. */
static void the_times_are_in_the_measured_order(void **state) {
    static const int ways[][2] = {{4, 4}, {8, 2}, {16, 1}, {2, 8}, {1, 16}};
    static const double measured[] = {0.266, 0.281, 0.30, 0.315, 0.372};
    const cores_model gpt2 = {12, 12, 1};
    double before = 0;
    (void)state;
    for (int i = 0; i < COUNT(ways); i++) {
        const double s = 2.28 * cores_time(&gpt2, ways[i][0], ways[i][1]); /* 1 x 1: 2.28 s */
        if (!(s > before) || s < 0.93 * measured[i] || s > 1.07 * measured[i])
            fail_msg("%d x %d: %g s, measured %g", ways[i][0], ways[i][1], s, measured[i]);
        before = s;
    }
}

static void the_rule_is_this_table(void **state) {
    static const struct {
        int cores, heads, kv_heads, trains, most, ranks, threads;
    } rows[] = {
        /* GPT-2 124M and make run, in training */
        {1, 12, 12, 1, 999, 1, 1},
        {2, 12, 12, 1, 999, 2, 1},
        {4, 12, 12, 1, 999, 4, 1},
        {8, 12, 12, 1, 999, 4, 2},
        {16, 12, 12, 1, 999, 4, 4},
        {2, 4, 4, 1, 999, 2, 1},
        {3, 4, 4, 1, 999, 3, 1},
        {16, 4, 4, 1, 999, 4, 4},
        /* without OpenMP */
        {2, 12, 12, 1, 1, 2, 1},
        {16, 12, 12, 1, 1, 16, 1},
        /* in generating: GPT-2, SmolLM2-135M, Llama 1B, one key head */
        {2, 12, 12, 0, 999, 2, 1},
        {16, 12, 12, 0, 999, 16, 1},
        {2, 9, 3, 0, 999, 2, 1},
        {16, 9, 3, 0, 999, 3, 5},
        {4, 32, 8, 0, 999, 4, 1},
        {16, 32, 8, 0, 999, 8, 2},
        {2, 8, 1, 0, 999, 2, 1},
        {0, 12, 12, 0, 999, 1, 1},
    };
    (void)state;
    for (int i = 0; i < COUNT(rows); i++) {
        const cores_model model = {rows[i].heads, rows[i].kv_heads, rows[i].trains};
        const cores_choice got = cores_choose(&model, rows[i].cores, 64, rows[i].most);
        if (got.ranks != rows[i].ranks || got.threads != rows[i].threads)
            fail_msg("%d cores, %d heads: %d x %d, not %d x %d", rows[i].cores, rows[i].heads,
                     got.ranks, got.threads, rows[i].ranks, rows[i].threads);
    }
}

/* ------------------------------------------------------- what the system says */

#if defined(__linux__)
/* Writes a file below the test's folder, with the folders on its way. */
static void put_file(const char *name, const char *text) {
    char path[2 * FILES_SIZE];
    FILE *file;
    (void)snprintf(path, sizeof path, "%s/%s", files_here, name);
    for (char *c = path + strlen(files_here) + 1; *c; c++) {
        if (*c != '/') continue;
        *c = '\0';
        (void)mkdir(path, 0777);
        *c = '/';
    }
    file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* Removes the test's folder with all that is in it. */
static int remove_folder(void **state) {
    char command[FILES_SIZE + 32];
    (void)state;
    (void)snprintf(command, sizeof command, "rm -rf '%s'", files_here);
    return system(command);
}

static void quotas_are_those_of_all_groups_above(void **state) {
    static const struct {
        const char *groups, *name, *text, *above, *above_text;
        int quota;
    } rows[] = {
        {"0::/a/b\n", "cpu.max", "150000 100000\n", "x", "", 2},
        {"0::/a/b\n", "a/b/cpu.max", "150000 100000\n", "cpu.max", "max 100000\n", 2},
        {"0::/a/b\n", "a/b/cpu.max", "400000 100000\n", "a/cpu.max", "300000 100000\n", 3},
        {"0::/a/b\n", "a/b/cpu.max", "max 100000\n", "a/cpu.max", "max 100000\n", 0},
        {"0::/\n", "cpu.max", "1000 100000\n", "x", "", 1},
        {"0::/elsewhere/c\n", "cpu.max", "200000 100000\n", "x", "", 2},
        {"4:cpuset:/\n3:cpu,cpuacct:/a\n0::/\n", "cpu/a/cpu.cfs_quota_us", "250000\n",
         "cpu/a/cpu.cfs_period_us", "100000\n", 3},
        {"3:cpuacct,cpu:/host/a\n", "cpu/cpu.cfs_quota_us", "50000", "cpu/cpu.cfs_period_us",
         "50000", 1},
        {"3:cpu:/\n", "cpu/cpu.cfs_quota_us", "-1\n", "cpu/cpu.cfs_period_us", "100000\n", 0},
        {"3:cpuacct:/\n", "cpu/cpu.cfs_quota_us", "100000\n", "cpu/cpu.cfs_period_us", "100000\n",
         0},
        {"0::/\n", "cpu.max", "rubbish", "x", "", 0},
        {"0::/\n", "cpu.max", "-5 -5", "x", "", 0},
        {"rubbish\n:\n::\n1:cpu\n", "cpu.max", "100000 100000", "x", "", 1},
        {"", "cpu.max", "100000 100000", "x", "", 0},
    };
    for (int i = 0; i < COUNT(rows); i++) {
        assert_int_equal(remove_folder(state), 0);
        assert_int_equal(files_begin(state), 0);
        put_file("cgroup", rows[i].groups);
        put_file(rows[i].above, rows[i].above_text);
        put_file(rows[i].name, rows[i].text);
        const int quota = tshi_threads_quota(files_here, files_here);
        if (quota != rows[i].quota) fail_msg("row %d: %d cores, not %d", i, quota, rows[i].quota);
    }
}

static void a_core_comes_before_its_second_hyperthread(void **state) {
    static const char *const lists[] = {"0,4\n", "1,5\n", "2-3\n", "2-3\n", "0,4\n", "1,5\n", "x"};
    static const int want[] = {0, 1, 2, 6, 3, 4, 5, 7}, some[] = {3, 4, 5, 64};
    tshi_threads_set set;
    static int order[TSHI_THREADS_CPUS];
    (void)state;
    for (int cpu = 0; cpu < COUNT(lists); cpu++) {
        char name[64];
        (void)snprintf(name, sizeof name, "cpu%d/topology/thread_siblings_list", cpu);
        put_file(name, lists[cpu]);
    }
    memset(&set, 0, sizeof set);
    set.word[0] = 0x7f; /* CPUs 0 to 6 */
    assert_int_equal(tshi_threads_order(files_here, &set, order), 4);
    for (int i = 0; i < 7; i++) assert_int_equal(order[i], want[i]);
    memset(&set, 0, sizeof set); /* their other hyperthreads are not in the set; 64 has no file */
    for (int i = 0; i < COUNT(some); i++)
        set.word[some[i] / TSHI_THREADS_BITS] |= 1ul << some[i] % TSHI_THREADS_BITS;
    assert_int_equal(tshi_threads_order(files_here, &set, order), 4);
    assert_memory_equal(order, some, sizeof some);
}

/* ------------------------------------------------------------------- binding */

/* The CPUs of each rank's thread, and of its OpenMP threads. */
typedef struct cores_seen {
    int threads; /* of each rank */
    tshi_threads_set rank[4], thread[4][2];
    int count[4];
} cores_seen;

static int look(tsh_ctx *ctx, void *user) {
    cores_seen *s = (cores_seen *)user;
    const int r = tsh_world(ctx)->rank;
    s->count[r] = tshi_threads_affinity(&s->rank[r]);
#if defined(_OPENMP)
#pragma omp parallel for num_threads(s->threads) schedule(static, 1)
#endif
    for (int i = 0; i < s->threads; i++) (void)tshi_threads_affinity(&s->thread[r][i]);
    return 0;
}

/* Runs ranks on at most `cpus` of the CPUs of this thread, whose affinity must be the same after
 * it. */
static void run_bound(int ranks, int threads, int bind, int cpus, cores_seen *s) {
    tsh_threads_desc how;
    tsh_desc desc;
    tshi_threads_set all, before, after;
    int some[4], n = 0;
    memset(s, 0, sizeof *s);
    memset(&how, 0, sizeof how);
    memset(&desc, 0, sizeof desc);
    s->threads = threads;
    how.ranks = ranks;
    how.bind = bind;
    desc.threads = threads;
    desc.logger.log = tsh_log_stderr;
    assert_true(tshi_threads_affinity(&all) >= cpus);
    for (int cpu = 0; cpu < TSHI_THREADS_CPUS && n < cpus; cpu++)
        if (tshi_threads_has(&all, cpu)) some[n++] = cpu;
    tshi_threads_bind_thread(some, n); /* as taskset does */
    assert_int_equal(tshi_threads_affinity(&before), cpus);
    assert_true(tsh_threads_cores() >= 1 && tsh_threads_cores() <= cpus);
    assert_int_equal(tsh_threads_run_with(&how, &desc, look, s), 0);
    (void)tshi_threads_affinity(&after);
    assert_memory_equal(&after, &before, sizeof after);
    assert_int_equal(syscall(SYS_sched_setaffinity, 0L, sizeof all, &all), 0);
}

static int overlap(const tshi_threads_set *a, const tshi_threads_set *b) {
    for (int cpu = 0; cpu < TSHI_THREADS_CPUS; cpu++)
        if (tshi_threads_has(a, cpu) && tshi_threads_has(b, cpu)) return 1;
    return 0;
}

static int usable(void) {
    tshi_threads_set set;
    const int count = tshi_threads_affinity(&set);
    return tshi_threads_within_quota(count) < count ? 0 : count;
}

static void each_rank_has_a_core_of_its_own(void **state) {
    cores_seen s;
    const int ranks = usable() < 4 ? usable() : 4;
    (void)state;
    if (ranks < 2) SKIP("fewer than two cores are free of a quota");
    run_bound(ranks, 1, 1, ranks, &s);
    for (int r = 0; r < ranks; r++) {
        assert_int_equal(s.count[r], 1);
        for (int other = 0; other < r; other++) assert_false(overlap(&s.rank[r], &s.rank[other]));
    }
    run_bound(ranks, 1, 0, ranks, &s); /* not asked for */
    for (int r = 0; r < ranks; r++) assert_int_equal(s.count[r], ranks);
}

static void each_thread_of_a_rank_has_a_core_of_its_own(void **state) {
    cores_seen s;
    (void)state;
#if !defined(_OPENMP)
    SKIP("no OpenMP");
#endif
    if (usable() < 2) SKIP("fewer than two cores are free of a quota");
    run_bound(1, 2, 1, 2, &s);
    assert_int_equal(s.count[0], 2);
    assert_true(overlap(&s.thread[0][0], &s.thread[0][1])); /* thread 0 is the rank's own */
    assert_memory_equal(&s.thread[0][0], &s.rank[0], sizeof s.rank[0]);
    tshi_threads_set second = s.thread[0][1];
    int count = 0;
    for (int cpu = 0; cpu < TSHI_THREADS_CPUS; cpu++) count += tshi_threads_has(&second, cpu);
    assert_int_equal(count, 1);
    if (usable() < 4) return;
    run_bound(2, 2, 1, 4, &s);
    assert_false(overlap(&s.rank[0], &s.rank[1]));
    assert_false(overlap(&s.thread[0][1], &s.rank[1]));
}

static void too_few_cores_bind_nothing(void **state) {
    cores_seen s;
    (void)state;
    if (usable() < 1) SKIP("the affinity is not known, or there is a quota");
    run_bound(3, 1, 1, 1, &s);
    for (int r = 0; r < 3; r++) assert_int_equal(s.count[r], 1); /* that of the process */
    if (usable() < 2) return;
    run_bound(3, 1, 1, 2, &s);
    for (int r = 0; r < 3; r++) assert_int_equal(s.count[r], 2);
    run_bound(2, 2, 1, 2, &s);
    for (int r = 0; r < 2; r++) assert_int_equal(s.count[r], 2);
}
#endif

static int count_rank(tsh_ctx *ctx, void *user) {
    if (tsh_world(ctx)->rank == 0) *(int *)user = tsh_world(ctx)->size;
    return tsh_world(ctx)->rank == 1 ? 7 : 0;
}

static void run_with_runs(void **state) {
    tsh_threads_desc how;
    int size = 0;
    (void)state;
    memset(&how, 0, sizeof how);
    assert_int_equal(tsh_threads_run_with(NULL, NULL, count_rank, &size),
                     tsh_threads_cores() > 1 ? 7 : 0);
    assert_int_equal(size, tsh_threads_cores());
    how.ranks = 3;
    assert_int_equal(tsh_threads_run_with(&how, NULL, count_rank, &size), 7);
    assert_int_equal(size, 3);
    how.ranks = -1;
    assert_int_equal(tsh_threads_run_with(&how, NULL, count_rank, &size), 1);
    assert_int_equal((tsh_threads_run_with)(&how, NULL, count_rank, &size), 1);
    assert_int_equal(tsh_threads_run_with_built(7003, 4, 8, &how, NULL, count_rank, &size), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_times_are_in_the_measured_order),
        cmocka_unit_test(the_rule_is_this_table),
#if defined(__linux__)
        cmocka_unit_test_setup_teardown(quotas_are_those_of_all_groups_above, files_begin,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(a_core_comes_before_its_second_hyperthread, files_begin,
                                        remove_folder),
        cmocka_unit_test(each_rank_has_a_core_of_its_own),
        cmocka_unit_test(each_thread_of_a_rank_has_a_core_of_its_own),
        cmocka_unit_test(too_few_cores_bind_nothing),
#endif
        cmocka_unit_test(run_with_runs),
    };
    return cmocka_run_group_tests_name("comm/cores", tests, NULL, NULL);
}
