/* Runs a command on each of several hosts with slow links between them, for benchmarks: network
 * namespaces and a relay of ../support/relay.h (needs the right to make them, and /dev/net/tun).
 *
 * usage: far DELAY_US RATE COMMAND...     RATE: of each link, as tc's tbf takes it; 0: no limit
 *
 * Command h is run by sh on host h, whose address is 10.77.0.(h + 1). When the first one ends, the
 * others are killed, and its exit code is that of this program. */
#define _GNU_SOURCE /* unshare, ppoll */
#include "../../tshard.h"
#include "../support/processes.h"
#include "../support/relay.h"

static void run_host(net *hosts, int h, const char *rate, const char *command) {
    static const char limit[] = "[ \"$0\" = 0 ] || tc qdisc add dev net0 root tbf rate \"$0\" "
                                "burst 128kb latency 50ms; exec sh -c \"$1\"";
    (void)setpgid(0, 0); /* so that all that the command starts ends with it */
    if (net_enter(hosts, h)) (void)execl("/bin/sh", "sh", "-c", limit, rate, command, (char *)NULL);
    (void)fprintf(stderr, "far: host %d cannot be made: %s\n", h,
                  strerror(net_get(&hosts->refused)));
    _exit(126);
}

int main(int argc, char **argv) {
    const int count = argc - 3;
    net_link link = {0, 0, 0, 0};
    pid_t pid[NET_HOSTS];
    net *hosts;
    int status = 0;
    if (count < 2 || count > NET_HOSTS) {
        (void)fprintf(stderr, "usage: far DELAY_US RATE COMMAND...   2 to %d of them\n",
                      (int)NET_HOSTS);
        return 2;
    }
    hosts = net_start(count, 1500);
    if (!hosts) return 126;
    link.delay_us = atoi(argv[1]);
    net_rule(hosts, ~0U, ~0U, link);
    for (int h = 0; h < count; h++) {
        pid[h] = fork();
        if (pid[h] == 0) run_host(hosts, h, argv[2], argv[3 + h]);
    }
    (void)waitpid(pid[0], &status, 0);
    for (int h = 1; h < count; h++) {
        (void)kill(-pid[h], SIGKILL);
        (void)waitpid(pid[h], NULL, 0);
    }
    net_end(hosts);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 126;
}
