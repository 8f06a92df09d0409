/* Every seed of fuzz_wire.c once, and what tshard_uv.h makes of it. */
#include "fuzz_wire.c"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../support/seeds.h"

typedef struct seed {
    const char *name;
    tsh_result code;
    int rank, peers, links, done; /* at fault; connections that were let in; requests that ended */
    const char *says;             /* the error, or what was logged of a stranger or a call */
} seed;

static const seed seeds[] = {
    /* A world forms, seen by ranks 0 and 2. */
    {"formed_by_0", TSH_OK, -1, 3, 6, 0, ""},
    {"formed_by_2", TSH_OK, -1, 3, 6, 0, ""},
    {"unknown_host", TSH_ERR_LOST, 1, 3, 6, 0, "it sent what is not a control message"},
    {"before_the_table", TSH_OK, -1, 1, 1, 0, ""},
    {"left", TSH_ERR_LOST, 1, 1, 0, 0, "left while its connections were made"},
    {"absent", TSH_ERR_TIMEOUT, 2, 1, 0, 0, "did not form in 20.0 s; absent ranks: 2 3"},
    {"unready", TSH_ERR_TIMEOUT, -1, 3, 6, 0, "between hosts? Still connecting: 2 3"},
    {"told_who_is_absent", TSH_ERR_TIMEOUT, 2, 0, 0, 0, "absent ranks: 2 3"},
    {"never_answered", TSH_ERR_TIMEOUT, -1, 0, 0, 0, "does not answer"},
    /* Strangers come. */
    {"wrong_key", TSH_OK, -1, 0, 0, 0, "it has another key"},
    {"replayed", TSH_OK, -1, 0, 0, 0, "it has another key"},
    {"reflected", TSH_OK, -1, 0, 0, 0, "it has another key"},
    {"other_version", TSH_OK, -1, 0, 0, 0, "it speaks another version"},
    {"other_job", TSH_OK, -1, 0, 0, 0, "rank 1 of 4: it belongs to another job"},
    {"other_size", TSH_OK, -1, 0, 0, 0, "rank 1 of 8: it belongs to a world of another size"},
    {"other_rank", TSH_OK, -1, 0, 0, 0, "it means another rank"},
    {"negative_rank", TSH_OK, -1, 0, 0, 0, "it means another rank"},
    {"other_purpose", TSH_OK, -1, 0, 0, 0, "no such group is being made"},
    {"twice", TSH_OK, -1, 1, 0, 0, "that rank is here already"},
    {"again", TSH_OK, -1, 1, 0, 0, ""},
    {"again_after_use", TSH_OK, -1, 1, 0, 0, "that rank is here already"},
    {"http", TSH_OK, -1, 0, 0, 0, "does not speak the protocol"},
    {"one_byte", TSH_OK, -1, 0, 0, 0, "no proof within 5 s"},
    {"came_and_went", TSH_OK, -1, 0, 0, 0, "came and went"},
    {"crowd", TSH_OK, -1, 1, 0, 0, "64 connections wait for their proof"},
    /* What this rank calls refuses it, or is something else. */
    {"refused_key", TSH_OK, -1, 0, 0, 0, "do not have the same key (TSHARD_KEY"},
    {"refused_size", TSH_ERR_ARGUMENT, 1, 0, 0, 0, "a world of 4 ranks (TSHARD_SIZE)"},
    {"refused_taken", TSH_ERR_ARGUMENT, 1, 0, 0, 0, "each rank needs its own TSHARD_RANK"},
    {"refused_job", TSH_OK, -1, 0, 0, 0, "it belongs to another job (this rank's job is \"job\")"},
    {"refused_rank", TSH_OK, -1, 0, 0, 0, "where rank 0 was expected"},
    {"refused_unknown", TSH_OK, -1, 0, 0, 0, "no such group is being made"},
    {"greeted_by_another", TSH_OK, -1, 0, 0, 0, "something else than tshard answers"},
    {"greeted_by_version_2", TSH_OK, -1, 0, 0, 0, "another version of the protocol"},
    {"answered_without_proof", TSH_OK, -1, 0, 0, 0, "do not have the same key"},
    /* Control messages. */
    {"asked", TSH_OK, -1, 0, 0, 0, ""},
    {"verdict", TSH_ERR_LOST, 1, 0, 0, 0, "gone"},
    {"abort", TSH_ERR_STATE, 2, 0, 0, 0, "the caller has enough"},
    {"ended", TSH_ERR_LOST, 2, 0, 0, 0, "its connection ended"},
    {"silent", TSH_ERR_LOST, 1, 0, 0, 0, "has been silent for"},
    {"left_later", TSH_OK, -1, 0, 0, 0, ""},
    {"accused", TSH_ERR_LOST, 2, 0, 0, 0, "rank 2 is at fault"},
    {"accused_too_late", TSH_ERR_LOST, 2, 0, 0, 0, "rank 2 is at fault"},
    {"outranked", TSH_ERR_LOST, 2, 0, 0, 0, "rank 2 is at fault"},
    {"odd", TSH_ERR_MISMATCH, 0, 0, 0, 0, "where rank 1 called all-reduce of 7 f32 (sum)"},
    {"unequal", TSH_ERR_MISMATCH, 1, 0, 0, 0,
     "send_counts[2] = 1 where rank 2 has recv_counts[1] = 2"},
    {"circle", TSH_ERR_MISMATCH, 1, 0, 0, 0, "rank 2 waits for it in receive"},
    {"circle_that_broke", TSH_OK, -1, 0, 0, 0, ""},
    {"circle_that_changed", TSH_OK, -1, 0, 0, 0, ""},
    {"circle_with_the_arbiter", TSH_ERR_MISMATCH, 1, 0, 0, 0, "rank 0 waits for it in receive"},
    {"no_circle", TSH_OK, -1, 0, 0, 0, ""},
    {"crossed", TSH_ERR_MISMATCH, 2, 0, 0, 0, "rank 1 waits for it in barrier"},
    {"confirmed", TSH_OK, -1, 0, 0, 0, ""},
    {"awaited", TSH_OK, -1, 0, 0, 1, ""},
    {"forgotten", TSH_ERR_LOST, 2, 0, 0, 0, "no byte has come through"},
    {"no_such_message", TSH_ERR_LOST, 1, 0, 0, 0, "it sent what is not a control message"},
    {"too_long", TSH_ERR_LOST, 1, 0, 0, 0, "it sent what is not a control message"},
    {"damaged_message", TSH_ERR_LOST, 1, 0, 0, 0,
     "the control connection of rank 0 (127.0.0.1:4000) "},
    {"damaged_payload", TSH_ERR_LOST, 1, 0, 0, 0, "the checksum of a control message is wrong"},
    {"cut", TSH_ERR_LOST, 1, 0, 0, 0, "it sent what is not a control message"},
    /* Data connections. */
    {"direct", TSH_OK, -1, 0, 0, 1, ""},
    {"ring", TSH_OK, -1, 0, 0, 1, ""},
    {"checked", TSH_OK, -1, 0, 0, 1, ""},
    {"checked_in_a_ring", TSH_OK, -1, 0, 0, 1, ""},
    {"checked_message", TSH_OK, -1, 0, 0, 1, ""},
    {"damaged_header", TSH_ERR_LOST, 1, 0, 0, 0,
     "the checksum of the header of all-reduce of 3 f32"},
    {"damaged_data", TSH_ERR_LOST, 1, 0, 0, 0,
     "the checksum of the payload of receive of 64 f32"},
    {"gathered", TSH_OK, -1, 0, 0, 1, ""},
    {"gathered_in_a_ring", TSH_OK, -1, 0, 0, 1, ""},
    {"scattered_in_a_ring", TSH_OK, -1, 0, 0, 1, ""},
    {"broadcast", TSH_OK, -1, 0, 0, 1, ""},
    {"in_one_go", TSH_OK, -1, 0, 0, 2, ""},
    {"received", TSH_OK, -1, 0, 0, 1, ""},
    {"sent", TSH_OK, -1, 0, 0, 1, ""},
    {"to_itself", TSH_OK, -1, 0, 0, 2, ""},
    {"other_digest", TSH_ERR_MISMATCH, 1, 0, 0, 0, "called different collectives"},
    {"other_bytes", TSH_ERR_MISMATCH, 1, 0, 0, 0, "called different collectives"},
    {"unfit", TSH_ERR_MISMATCH, 1, 0, 0, 0, "called receive of 65 f32 from rank 0"},
    {"unfit_to_itself", TSH_ERR_MISMATCH, 0, 0, 0, 0, "called receive of 1 f32 from rank 0"},
    {"unasked", TSH_ERR_LOST, 1, 0, 0, 0, "sent what nobody asked for"},
    {"data_ended", TSH_ERR_LOST, 1, 0, 0, 0, "closed its connection"},
    {"late", TSH_ERR_TIMEOUT, 1, 0, 0, 0, "absent ranks: 1 2 3"},
    {"late_in_a_send", TSH_ERR_TIMEOUT, 1, 0, 0, 0, "to rank 1 of world; absent ranks: 1"},
    {"split", TSH_OK, -1, 0, 6, 0, ""},
    /* Encrypted connections. */
    {"sealed_join", TSH_ERR_LOST, 1, 1, 0, 0, "left while its connections were made"},
    {"sealed_join_by_aes", TSH_ERR_LOST, 1, 1, 0, 0, "left while its connections were made"},
    {"sealed_call", TSH_ERR_TIMEOUT, 2, 1, 0, 0, "absent ranks: 2 3"},
    {"sealed_without_a_key", TSH_OK, -1, 0, 0, 0, "it has another key"},
    {"sealed_share_changed", TSH_OK, -1, 0, 0, 0, "it has another key"},
    {"sealed_share_of_zeros", TSH_OK, -1, 0, 0, 0, "a share that is not valid"},
    {"sealed_verdict", TSH_ERR_LOST, 1, 0, 0, 0, "gone"},
    {"sealed_message_damaged", TSH_ERR_LOST, 1, 0, 0, 0, "the tag of a control message is wrong"},
    {"sealed_message_in_the_clear", TSH_ERR_LOST, 1, 0, 0, 0,
     "the tag of a control message is wrong"},
    {"sealed_direct", TSH_OK, -1, 0, 0, 1, ""},
    {"sealed_direct_by_aes", TSH_OK, -1, 0, 0, 1, ""},
    {"sealed_ring", TSH_OK, -1, 0, 0, 1, ""},
    {"sealed_ring_by_aes", TSH_OK, -1, 0, 0, 1, ""},
    {"sealed_received", TSH_OK, -1, 0, 0, 1, ""},
    {"sealed_received_by_aes", TSH_OK, -1, 0, 0, 1, ""},
    {"sealed_sent", TSH_OK, -1, 0, 0, 1, ""},
    {"sealed_header_damaged", TSH_ERR_LOST, 1, 0, 0, 0,
     "the tag of the header of all-reduce of 3 f32"},
    {"sealed_data_damaged", TSH_ERR_LOST, 1, 0, 0, 0,
     "the tag of the payload of receive of 64 f32"},
    {"sealed_ended", TSH_ERR_LOST, 1, 0, 0, 0, "closed its connection"},
};

enum { SEEDS = sizeof seeds / sizeof seeds[0] };

static void every_seed_is_heard(void **state) {
    static uint8_t data[4096];
    static wire w;
    (void)state;
    for (int i = 0; i < SEEDS; i++) {
        const seed *s = &seeds[i];
        size_t size = seeds_read("wire", s->name, data, sizeof data);
        const char *said;
        wire_run(&w, data, size);
        said = w.error.code == TSH_OK ? w.heard : w.error.message;
        if (w.error.code != s->code || (s->code != TSH_OK && w.error.rank != s->rank) ||
            w.peers != s->peers || w.links != s->links || w.done != s->done ||
            !strstr(said, s->says))
            fail_msg("%s: %s of rank %d, %d peers, %d links, %d done: %s", s->name,
                     tsh_result_name(w.error.code), w.error.rank, w.peers, w.links, w.done, said);
    }
    assert_int_equal(LLVMFuzzerTestOneInput(data, 0), 0);
}

static void every_seed_is_known(void **state) {
    (void)state;
    assert_int_equal(seeds_each("wire", NULL), SEEDS);
}

/* Whole worlds: rank 0 lets three ranks in, rank 2 joins; both end up complete. */
static void worlds_are_complete(void **state) {
    static const char *const names[] = {"formed_by_0", "formed_by_2"};
    static uint8_t data[4096];
    static wire w;
    (void)state;
    for (int i = 0; i < 2; i++) {
        size_t size = seeds_read("wire", names[i], data, sizeof data);
        wire_run(&w, data, size);
        assert_true(w.complete);
        wire_run(&w, data, size - 30); /* without the last message */
        assert_false(w.complete);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_seed_is_heard),
        cmocka_unit_test(every_seed_is_known),
        cmocka_unit_test(worlds_are_complete),
    };
    return cmocka_run_group_tests_name("fuzz seeds of the wire", tests, NULL, NULL);
}
