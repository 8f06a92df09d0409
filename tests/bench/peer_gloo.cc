/* gloo over TCP on 127.0.0.1: peer_gloo RANKS, then the commands of ranks_bench.h.
 *
 *     c++ -std=c++14 -O3 tests/bench/peer_gloo.cc -lgloo -pthread
 *
 * Of gloo's two rings the faster one: below 1 MiB the classes, from there on the functions that
 * PyTorch calls at every size. The one reduce-scatter that gloo has is a class of halving and
 * doubling, in place; of many megabytes its sums are wrong now and then where cores are scarce, and
 * then it has no row. What a call needs is made once per size and used again. */
#include "ranks_bench.h"

#include <gloo/allgather.h>
#include <gloo/allgather_ring.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_ring.h>
#include <gloo/math.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/device.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace {

const size_t LARGE = 1048576 / sizeof(float);

struct world {
    std::shared_ptr<gloo::transport::Device> device;
    std::unique_ptr<gloo::rendezvous::FileStore> store;
    std::map<std::tuple<int, long, float *, float *>, std::function<void()>> calls;
};

std::function<void()> make(const bench *b, const std::shared_ptr<gloo::Context> &context, int kind,
                           float *send, float *recv, long count) {
    const size_t n = static_cast<size_t>(count), piece = n / static_cast<size_t>(b->ranks);
    if (kind == BENCH_ALLREDUCE && n < LARGE) {
        auto ring = std::make_shared<gloo::AllreduceRing<float>>(
            context, std::vector<float *>{recv}, static_cast<int>(n));
        return [ring] { ring->run(); };
    }
    if (kind == BENCH_ALLGATHER && n < LARGE) {
        auto ring = std::make_shared<gloo::AllgatherRing<float>>(
            context, std::vector<const float *>{send}, recv, static_cast<int>(piece));
        return [ring] { ring->run(); };
    }
    if (kind == BENCH_ALLREDUCE) {
        auto options = std::make_shared<gloo::AllreduceOptions>(context);
        options->setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
        options->setReduceFunction(
            static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
        options->setOutput(recv, n);
        return [options] { gloo::allreduce(*options); };
    }
    if (kind == BENCH_ALLGATHER) {
        auto options = std::make_shared<gloo::AllgatherOptions>(context);
        options->setInput(send, piece);
        options->setOutput(recv, n);
        return [options] { gloo::allgather(*options); };
    }
    const std::vector<int> pieces(static_cast<size_t>(b->ranks), static_cast<int>(piece));
    auto algorithm = std::make_shared<gloo::ReduceScatterHalvingDoubling<float>>(
        context, std::vector<float *>{send}, static_cast<int>(n), pieces);
    return [algorithm] { algorithm->run(); };
}

/* Connections of its own for every call that is prepared: the classes set the buffers of the
 * sockets they use by the size of their data. */
std::shared_ptr<gloo::Context> connect(const bench *b, world *w) {
    auto context = std::make_shared<gloo::rendezvous::Context>(b->rank, b->ranks);
    gloo::rendezvous::PrefixStore store(std::to_string(w->calls.size()), *w->store);
    context->connectFullMesh(store, w->device);
    return context;
}

const float *call(bench *b, int kind, float *send, float *recv, long count) {
    world *w = static_cast<world *>(b->user);
    const auto key = std::make_tuple(kind, count, send, recv);
    try {
        auto known = w->calls.find(key);
        if (known == w->calls.end())
            known = w->calls.emplace(key, make(b, connect(b, w), kind, send, recv, count)).first;
        known->second();
    } catch (const std::exception &why) {
        (void)fprintf(stderr, "peer_gloo: %s\n", why.what());
        return nullptr;
    }
    return kind == BENCH_REDUCE_SCATTER ? send : recv;
}

int rank_main(bench *b, void *folder) {
    world w;
    int failed;
    w.device = gloo::transport::tcp::CreateDevice("127.0.0.1");
    w.store.reset(new gloo::rendezvous::FileStore(static_cast<const char *>(folder)));
    b->call = call;
    b->user = &w;
    failed = bench_serve(b);
    for (const auto &path : w.store->getAllKeyFilePaths()) (void)remove(path.c_str());
    return failed;
}

} // namespace

int main(int argc, char **argv) {
    char folder[] = "/tmp/peer_gloo.XXXXXX";
    int failed;
    if (argc != 2 || !mkdtemp(folder)) return 2;
    failed = bench_processes(atoi(argv[1]), rank_main, folder);
    (void)rmdir(folder);
    return failed;
}
