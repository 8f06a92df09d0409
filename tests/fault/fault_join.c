/* F6, F8, F14 and the speed of joining: how a world forms, or why it does not. */
#define _GNU_SOURCE /* unshare */
#define TSHARD_IMPLEMENTATION
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"
#include "../support/collectives.h"
#include "../support/faults.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h> /* fchmod */

static void sum_rank(job *j) {
    int64_t sum = j->rank;
    CHECK(tsh_allreduce(&j->comm, &sum, 1, TSH_I64, TSH_SUM) == TSH_OK);
    CHECK(sum == (int64_t)j->ranks * (j->ranks - 1) / 2);
    CHECK(tsh_barrier(&j->comm) == TSH_OK);
}

/* ----------------------------------------------------------------------- speed */

/* From the first fork to the last rank's return from tsh_uv_open. */
static void speed_row(int ranks) {
    static samples ms;
    int runs = fault_full() ? 100 : 15;
    ms.count = 0;
    fault_begin("F14", "%d ranks join", ranks);
    for (int i = 0; i < runs; i++) {
        world_desc desc = world_over_tcp(ranks, sum_rank, NULL, 60);
        int64_t last = 0;
        const char *why;
        world w;
        world_start(&w, &desc);
        why = world_end(&w);
        if (why) fault_fail("%s", why);
        for (int r = 0; r < ranks; r++)
            if (w.jobs[r].opened_at > last) last = w.jobs[r].opened_at;
        sample_add(&ms, (double)(last - w.began) / 1e6);
        world_free(&w);
    }
    fault_figure("runs", runs, "");
    fault_figure("p50", sample_percentile(&ms, 50), "ms");
    fault_at_most("max", sample_percentile(&ms, 100), "ms", 500);
    fault_end();
}

/* ------------------------------------------------------------------- F6 absent */

static void absent_prepare(job *j, tsh_uv_desc *uv) {
    unsigned absent = *(const unsigned *)j->user;
    uv->timeout = 1;
    if (absent >> j->rank & 1) exit(0);
    j->at = now_ns();
}

static void absent_row(int ranks, unsigned absent, const char *list) {
    world_desc desc = world_over_tcp(ranks, sum_rank, &absent, 60);
    double late = 0, early = 1e9;
    int listed = 0, present = 0;
    const char *why;
    world w;
    desc.may_fail = 1;
    desc.prepare = absent_prepare;
    fault_begin("F6", "N=%d, absent:%s", ranks, list);
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fault_fail("%s", why);
    for (int r = 0; r < ranks; r++) {
        const job *j = &w.jobs[r];
        double ms = (double)(j->opened_at - j->at) / 1e6 - 1000;
        char words[64];
        if (absent >> r & 1) continue;
        (void)snprintf(words, sizeof words, absent & 1 ? "did not reach rank%s" : "absent ranks:%s",
                       list);
        present++;
        if (j->opened == TSH_ERR_TIMEOUT && strstr(j->why.message, words))
            listed++;
        else
            fault_fail("rank %d got %s: %s", r, tsh_result_name(j->opened), j->why.message);
        late = ms > late ? ms : late;
        early = ms < early ? ms : early;
    }
    fault_at_least("listed", 100.0 * listed / present, "%", 100);
    fault_at_least("after the limit", early, "ms", -20); /* rank 0 may have begun earlier */
    fault_at_most("at most", late, "ms", 200);
    fault_end();
    world_free(&w);
}

/* ---------------------------------------------------------------- F14 any order */

/* The user is the delays in ms, by rank. */
static void order_prepare(job *j, tsh_uv_desc *uv) {
    const int *delays = (const int *)j->user;
    (void)uv;
    sleep_ms(delays[j->rank]);
}

static void order_row(void) {
    int runs = fault_full() ? 100 : 20, apart = fault_full() ? 5000 : 600, joined = 0;
    fault_begin("F14", "%d start orders, up to %d ms apart, N=5", runs, apart);
    for (int i = 0; i < runs; i++) {
        int delays[5];
        world_desc desc = world_over_tcp(5, sum_rank, delays, 60);
        const char *why;
        world w;
        for (int r = 0; r < 5; r++)
            delays[r] = (int)(mix((uint64_t)(i * 10 + r)) % (uint64_t)(apart + 1));
        desc.prepare = order_prepare;
        world_start(&w, &desc);
        why = world_end(&w);
        if (why) fault_fail("run %d: %s", i, why);
        joined += !why;
        world_free(&w);
    }
    fault_at_least("joined", 100.0 * joined / runs, "%", 100);
    fault_end();
}

/* ------------------------------------------------------------- F8 names and ports */

/* The port is a stranger's: rank 0 says which variable to set. */
static void taken_prepare(job *j, tsh_uv_desc *uv) {
    uv->timeout = 2;
    uv->size = 2;
    uv->port = *(const int *)j->user;
}

static void taken_row(void) {
    int port = 0, taken = listen_anywhere(&port);
    world_desc desc = world_over_tcp(1, sum_rank, &port, 60);
    const tsh_error *why_not;
    const char *why;
    char number_text[16];
    world w;
    fault_begin("F8", "the port is taken");
    (void)snprintf(number_text, sizeof number_text, "%d", port);
    desc.may_fail = 1;
    desc.prepare = taken_prepare;
    desc.unbound = 1;
    world_start(&w, &desc);
    why = world_end(&w);
    why_not = &w.jobs[0].why;
    if (why) fault_fail("%s", why);
    if (w.jobs[0].opened != TSH_ERR_IO || !strstr(why_not->message, "TSHARD_PORT") ||
        !strstr(why_not->message, number_text))
        fault_fail("%s: %s", tsh_result_name(w.jobs[0].opened), why_not->message);
    fault_at_least("named TSHARD_PORT and the port", !fault_row.why[0], "", 1);
    fault_end();
    world_free(&w);
    (void)close(taken);
}

/* /etc/hosts of this process only. 1: done. */
static int private_hosts(const char *text) {
    char path[] = "/tmp/tshard-hosts-XXXXXX";
    int fd = mkstemp(path), done;
    if (fd < 0) return 0;
    done = write(fd, text, strlen(text)) == (ssize_t)strlen(text) && fchmod(fd, 0644) == 0 &&
           unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount(path, "/etc/hosts", NULL, MS_BIND, NULL) == 0;
    (void)close(fd);
    (void)unlink(path);
    return done;
}

typedef struct place {
    const char *name, *host, *bind, *hosts; /* bind: rank 0's; hosts: lines of /etc/hosts */
} place;

static void place_prepare(job *j, tsh_uv_desc *uv) {
    const place *p = (const place *)j->user;
    if (p->hosts && !private_hosts(p->hosts)) {
        j->told = 1;
        exit(0);
    }
    uv->host = p->host;
    uv->bind = j->rank == 0 ? p->bind : NULL;
    uv->timeout = 10;
}

static int address_exists(const char *text) {
    struct sockaddr_in6 address;
    int fd = socket(AF_INET6, SOCK_STREAM, 0), found;
    memset(&address, 0, sizeof address);
    address.sin6_family = AF_INET6;
    address.sin6_addr.s6_addr[15] = 1;
    found = strcmp(text, "::1") != 0 ||
            (fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0);
    if (fd >= 0) (void)close(fd);
    return found;
}

static void place_row(const place *p) {
    world_desc desc = world_over_tcp(3, sum_rank, p, 60);
    const char *why;
    world w;
    fault_begin("F8", "%s", p->name);
    if (!address_exists(p->host)) {
        fault_skip("this machine has no %s", p->host);
        return;
    }
    desc.prepare = place_prepare;
    desc.unbound = 1;
    world_start(&w, &desc);
    why = world_end(&w);
    if (w.jobs[0].told) {
        fault_skip("a private /etc/hosts needs the right to mount");
    } else {
        if (why) fault_fail("%s", why);
        fault_at_least("joined", !why, "", 1);
        fault_end();
    }
    world_free(&w);
}

int main(void) {
    static const place places[] = {
        {"host is 127.0.1.1", "127.0.1.1", NULL, NULL},
        {"a name that resolves to 127.0.1.1", "thishost", NULL,
         "127.0.0.1 localhost\n127.0.1.1 thishost\n"},
        {"IPv6 only", "::1", NULL, NULL},
        {"a name with IPv6 only", "sixhost", NULL, "::1 sixhost\n"},
        {"the name's first address is dead", "twohost", "127.0.0.1",
         "127.0.0.9 twohost\n127.0.0.1 twohost\n"},
    };
    speed_row(8);
    absent_row(4, 0xc, " 2 3");
    absent_row(3, 0x2, " 1");
    absent_row(8, 0xa8, " 3 5 7");
    absent_row(4, 0x1, " 0");
    taken_row();
    for (int i = 0; i < 5; i++) place_row(&places[i]);
    order_row();
    return fault_result();
}
