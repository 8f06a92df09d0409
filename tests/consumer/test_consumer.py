#!/usr/bin/env python3
"""Uses tshard as other projects do: with CMake (add_subdirectory, FetchContent, find_package),
with pkg-config, as a shared library from Python. Each way trains the first example. Reports in
cmocka's words."""

import ctypes
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

SCRIPT_LIMIT = 450
HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "tests", "support"))
from scripts import ENVIRONMENT, Failed, Skipped, check, make_debug, run_tests
import train

CC = os.environ.get("CC", "cc")
CXX = os.environ.get("CXX", "c++")
# Where the way of building is what is tested, and another test builds the kernels of the processor
# so: half the time of compiling the implementation.
PORTABLE = "-DTSHARD_NO_SIMD"
FLAGS = {"CFLAGS": PORTABLE, "CXXFLAGS": PORTABLE}  # as CMake and Meson read them
STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror"]
SMALL = ["-O2", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "-s"]
SMALL_LIMIT = 351e3  # bytes of a program with one linear layer; tsh_desc.wire took 8 KB of it


def call(command, **environment):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200,
                          universal_newlines=True, env=dict(ENVIRONMENT, **environment))
    return done.returncode, done.stdout


def must(command, **environment):
    code, text = call(command, **environment)
    if code:
        raise Failed("%s\n%s" % (" ".join(command), text))
    return text


def needs(**packages):
    """Skips the test if one of these commands is missing, and names its package."""
    for command, package in packages.items():
        command = {"cxx": CXX, "pkg_config": "pkg-config"}.get(command, command)
        if not shutil.which(command):
            raise Skipped("%s is not here: apt-get install %s" % (command, package))


def check_losses(text):
    """The loss was about 1 before the first step, and is small after the last."""
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", text, re.M)]
    check(len(losses) >= 6, "not the losses of 6 steps or more:", text)
    check(losses[0] > 0.3 and losses[-1] < 0.1, "the loss did not fall:", text)


def first_example(folder, alone=True):
    """A copy of examples/01_autograd.c that includes an installed header, with the implementation
    if alone; its path."""
    with open(os.path.join(TOP, "examples", "01_autograd.c"), encoding="utf-8") as file:
        text = file.read()
    check(text.count('"../tshard.h"') == 1, "01_autograd.c does not include ../tshard.h")
    text = text.replace('"../tshard.h"', '"tshard.h"')
    if not alone:
        text = text.replace("#define TSHARD_IMPLEMENTATION\n", "")
    path = os.path.join(folder, "first.c")
    with open(path, "w", encoding="utf-8") as out:
        out.write(text)
    return path


def macros():
    """The version as tshard.h's macros say it."""
    with open(os.path.join(TOP, "tshard.h"), encoding="utf-8") as file:
        return ".".join(re.findall(r"^#define TSHARD_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$",
                                   file.read(), re.M))


def minor():
    return macros().rpartition(".")[0]


# ---- installed by make -------------------------------------------------------


WORK = tempfile.TemporaryDirectory()  # for what make builds, once for all tests


def make(*goals, prefix, destdir=""):
    return make_debug("PREFIX=" + prefix, "DESTDIR=" + destdir, *goals)


def installed():
    """The prefix of a tshard that make has installed, with the shared library."""
    prefix = os.path.join(WORK.name, "prefix")
    if not os.path.exists(prefix):
        make("shared", "install", prefix=prefix)
    return prefix


def files_below(folder):
    return sorted(os.path.relpath(os.path.join(path, name), folder)
                  for path, _, names in os.walk(folder) for name in names)


def make_installs_and_uninstalls(folder):
    expected = ["include/tshard/tshard.h", "include/tshard/tshard.c", "share/doc/tshard/LICENSE",
                "lib/pkgconfig/tshard.pc", "lib/cmake/tshard/tshardConfig.cmake",
                "lib/cmake/tshard/tshardConfigVersion.cmake"]
    expected += ["include/tshard/backends/" + os.path.basename(path)
                 for path in glob.glob(os.path.join(TOP, "backends", "*.h"))]
    root = os.path.join(folder, "opt", "tshard")
    text = make("install", "UV=", "OUT=" + os.path.join(WORK.name, "build"), prefix="/opt/tshard",
                destdir=folder)
    check(files_below(root) == sorted(expected), "installed:", files_below(root))
    check("tshard-run is not installed: it needs libuv1-dev" in text, "without libuv:", text)

    text = make("shared", "install", prefix="/opt/tshard", destdir=folder)
    expected += ["lib/libtshard.so", "lib/libtshard.so." + minor(),
                 "share/gdb/auto-load/opt/tshard/lib/libtshard.so.%s-gdb.py" % minor()]
    if "tshard-run is not installed" not in text:
        expected.append("bin/tshard-run")
        code, usage = call([os.path.join(root, "bin", "tshard-run")])
        check(code != 0 and "tshard-run" in usage, "tshard-run:", usage)
    check(files_below(root) == sorted(expected), "installed:", files_below(root))
    with open(os.path.join(root, "lib", "pkgconfig", "tshard.pc"), encoding="utf-8") as file:
        text = file.read()
    check("prefix=/opt/tshard\n" in text and folder not in text, "DESTDIR in tshard.pc:", text)

    make("uninstall", prefix="/opt/tshard", destdir=folder)
    check(files_below(root) == [], "left behind:", files_below(root))
    check(not os.path.exists(os.path.join(root, "include", "tshard")), "a folder is left behind")


def version_is_the_same_everywhere(_):
    with open(os.path.join(TOP, "tshard.h"), encoding="utf-8") as file:
        front = re.search(r"Version (\d+\.\d+\.\d+)\.", file.read())[1]
    with open(os.path.join(TOP, "CHANGELOG.md"), encoding="utf-8") as file:
        latest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", file.read(), re.M)[1]
    check(macros() == front == latest, "macros, top of tshard.h, CHANGELOG:", macros(), front,
          latest)
    for path, form in (("meson.build", r"version: '(.*?)'"), (
            os.path.join("backends", "package", "vcpkg", "vcpkg.json"), r'"version": "(.*?)"')):
        with open(os.path.join(TOP, path), encoding="utf-8") as file:
            check(re.search(form, file.read())[1] == macros(), path, "has another version")


# ---- CMake -------------------------------------------------------------------


def build_with_cmake(folder, way, *options, alone=True, **environment):
    """Configures and builds tests/consumer without optimisation, runs both programs; returns the
    build folder and what CMake printed. If alone, the first example compiles the implementation."""
    needs(cmake="cmake", cxx="g++")
    build = os.path.join(folder, "build")
    text = must(["cmake", "-S", HERE, "-B", build, "-DCMAKE_BUILD_TYPE=Debug", "-DWAY=" + way,
                 "-DSOURCE=" + TOP, "-DVERSION=" + macros(),
                 "-DFIRST=" + first_example(folder, alone),
                 "-DFIRST_USES=" + ("tshard" if alone else "static")] + list(options),
                **environment)
    must(["cmake", "--build", build, "--parallel", "2"])
    for program in "first", "parallel":
        check_losses(must([os.path.join(build, program)]))
    return build, text


def check_backends(build, text, names):
    """Each backend was linked and runs, or its target is not there and a message says why."""
    check(must([os.path.join(build, "with_all")]).strip() == "10", "all together did not run")
    for name in names:
        program = os.path.join(build, "with_" + name)
        if os.path.exists(program):
            check(must([program]).strip() == "10", name, "did not run")
        else:
            check("tshard::%s is not defined; missing: " % name in text, name, "is missing:", text)


def add_subdirectory(folder):
    build, text = build_with_cmake(folder, "subdirectory", alone=False)
    check_backends(build, text, ["uv", "mpi", "blis"])


def fetch_content(folder):
    build_with_cmake(folder, "fetch", "-DFETCHCONTENT_SOURCE_DIR_TSHARD=" + TOP,
                     "-DTSHARD_BACKENDS=threads", alone=False, **FLAGS)


def find_package_installed_by_make(folder):
    """Headers only: the C++ program compiles the implementation, as C++."""
    build_with_cmake(folder, "package", "-DCMAKE_PREFIX_PATH=" + installed())


def find_package_installed_by_cmake(folder):
    """With the static library, and with the TCP backend if its libraries are installed."""
    needs(cmake="cmake", cxx="g++")
    own, prefix = os.path.join(folder, "own"), os.path.join(folder, "prefix")
    text = must(["cmake", "-S", TOP, "-B", own, "-DCMAKE_BUILD_TYPE=Debug",
                 "-DCMAKE_INSTALL_PREFIX=" + prefix, "-DTSHARD_BACKENDS=threads;uv"], **FLAGS)
    must(["cmake", "--build", own, "--parallel", "2"])
    must(["cmake", "--install", own])
    there = files_below(prefix)
    check(any(path.endswith("libtshard.a") for path in there), "no static library:", there)
    backends = [] if "tshard::uv is not defined" in text else ["uv"]
    check(("bin/tshard-run" in there) == bool(backends), "tshard-run:", there, text)
    build, text = build_with_cmake(folder, "package", "-DCMAKE_PREFIX_PATH=" + prefix,
                                   "-DCOMPONENTS=" + ";".join(["static"] + backends), alone=False)
    check_backends(build, text, backends)


REQUESTS = """cmake_minimum_required(VERSION 3.16)
project(requests LANGUAGES C)
foreach(version %(versions)s)
    find_package(tshard ${version} QUIET COMPONENTS threads)
    message(STATUS "request ${version}: ${tshard_FOUND}")
endforeach()
find_package(tshard COMPONENTS threads OPTIONAL_COMPONENTS uv)
message(STATUS "optional uv: ${tshard_uv_FOUND}")
find_package(tshard REQUIRED COMPONENTS %(component)s)
"""


def find_package_says_what_is_missing(folder):
    """Versions that do not fit, a library that is not there, a component that does not exist."""
    needs(cmake="cmake")
    major, minor, _ = map(int, macros().split("."))
    fits = {macros(): "1", "%d.%d" % (major, minor): "1", "%d.%d" % (major, minor + 1): "0",
            "%d.0" % (major + 1): "0"}
    if minor > 0:  # an earlier minor version: compatible from 1.0 on
        fits["%d.%d" % (major, minor - 1)] = "1" if major > 0 else "0"
    for component, why in (("uv", "uv.h or libuv"), ("none", "tshard has no such component"),
                           ("static", "cmake --install makes it")):
        source = os.path.join(folder, component)
        os.mkdir(source)
        with open(os.path.join(source, "CMakeLists.txt"), "w", encoding="utf-8") as out:
            out.write(REQUESTS % {"component": component, "versions": " ".join(fits)})
        # CMake does not search again for what has a value, even an empty one: libuv is missing.
        code, text = call(["cmake", "-S", source, "-B", os.path.join(source, "build"),
                           "-DTSHARD_UV_LIBRARY=", "-DCMAKE_PREFIX_PATH=" + installed()])
        words = " ".join(text.split())
        check(code != 0 and "tshard::%s is not defined; missing: " % component in words
              and why in words, component, "is not refused:", text)
        found = re.findall(r"request (\S+): (\S+)", text)
        check(dict(found) == fits, "versions:", found)
        check("optional uv: FALSE" in text, "a missing option:", text)


# ---- other ways --------------------------------------------------------------


def pkg_config(folder):
    """In C with the headers alone, in C++ with the shared library."""
    needs(pkg_config="pkg-config", cxx="g++")
    path = os.path.join(installed(), "lib", "pkgconfig")

    def ask(*what):
        return must(["pkg-config"] + list(what) + ["tshard"], PKG_CONFIG_PATH=path).split()

    check(ask("--modversion") == [macros()], "version:", ask("--modversion"))
    program = os.path.join(folder, "program")
    must([CC, "-std=c99", "-O0", PORTABLE] + STRICT + [first_example(folder), "-o", program]
         + ask("--cflags", "--libs"))
    check_losses(must([program]))
    library = os.path.join(installed(), "lib")
    must([CXX, "-std=c++17", "-O0"] + STRICT + [os.path.join(HERE, "parallel.cpp"), "-o", program]
         + ask("--cflags", "--libs", "--static")
         + ["-L", library, "-ltshard", "-Wl,-rpath," + library])
    check_losses(must([program]))


def shared_library_from_python(_):
    library = os.path.join(installed(), "lib", "libtshard.so")
    text = must([sys.executable, "-B", os.path.join(HERE, "train.py"), library])
    check(text.startswith("version %s\n" % macros()), "another version:", text)
    check_losses(text)


def structures_of_python_are_those_of_c(folder):
    source, program = os.path.join(folder, "sizes.c"), os.path.join(folder, "sizes")
    with open(source, "w", encoding="utf-8") as out:
        out.write('#include "tshard.h"\nint main(void) {\n')
        for name, (_, last) in train.STRUCTURES.items():
            out.write('    printf("%s %%d %%d\\n", (int)sizeof(%s), (int)offsetof(%s, %s));\n'
                      % (name, name, name, last))
        out.write("    return 0;\n}\n")
    must([CC, "-std=c99", "-O0", "-I", TOP, source, "-o", program])
    for line in must([program]).splitlines():
        name, size, offset = line.split()
        here, last = train.STRUCTURES[name]
        check((ctypes.sizeof(here), getattr(here, last).offset) == (int(size), int(offset)),
              name, "differs in tests/consumer/train.py")


def shared_library_has_public_functions_only(_):
    needs(nm="binutils")
    library = os.path.join(installed(), "lib", "libtshard.so")
    exported = set(re.findall(r" [A-Z] (\w+)$", must(["nm", "-D", "--defined-only", library]),
                              re.M))
    declared = set()
    for header in "tshard.h", "backends/tshard_backend.h", "backends/tshard_threads.h":
        with open(os.path.join(TOP, header), encoding="utf-8") as file:
            text = file.read().split("/* end of header: stop here")[0]
        declared.update(re.findall(r"^TSH_API [^;(]*?\b(tshb?_\w+)\(", text, re.M))
    check(len(declared) > 200, "only", len(declared), "functions found in the headers")
    check(exported == declared, "exported, or declared, alone:", sorted(exported ^ declared))
    check(os.readlink(library) == "libtshard.so." + minor(), library, "is no link to it")
    if shutil.which("readelf"):
        soname = re.search(r"SONAME.*\[(.*)\]", must(["readelf", "-d", library]))
        check(soname and soname[1] == "libtshard.so." + minor(), "soname:", soname)


REFUSED = """open TSH_ERR_UNSUPPORTED
kept: tsh_open: {new}
run 1
run_on 1
given: tsh_open: {new}
threads_run 1
old open TSH_ERR_UNSUPPORTED
kept: tsh_open: {old}
old run 1
old run_on 1
old threads_run 1
called 0
"""


def other_builds_are_refused(folder):
    """A program of another TSHARD_REAL, one of another version, one of 0.1, by a link."""
    library = os.path.join(installed(), "lib")
    headers = os.path.join(folder, "headers")
    shutil.copytree(os.path.join(installed(), "include", "tshard"), headers)
    path = os.path.join(headers, "tshard.h")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(re.sub("(TSHARD_VERSION_MINOR) .*", r"\1 9", text))
    old = ("the program was compiled with tshard.h 0.1, the library is %s; compile the program "
           "with the library's header" % minor())
    for include, flags, new in (
            (os.path.join(installed(), "include", "tshard"), ["-DTSHARD_REAL=double"],
             "the program was compiled with a tsh_real of 8 bytes and a tsh_desc of "),
            (headers, [], old.replace("0.1", macros()[0] + ".9", 1))):
        program = os.path.join(folder, "program")
        must([CC, "-std=c99"] + flags + ["-I", include, os.path.join(HERE, "mismatch.c"), "-o",
                                         program, "-L", library, "-ltshard", "-Wl,-rpath,"
                                         + library])
        text = must([program])
        logged = re.findall(r"^logged: (\w+): (.*) \(TSH_ERR_UNSUPPORTED\)$", text, re.M)
        check([name for name, _ in logged] == ["tsh_open"] * 3 + ["tsh_threads_run"]
              + ["tsh_open"] * 2 + ["tsh_threads_run"], "logged:", text)
        check(all(said.startswith(new) for _, said in logged[:4]), "not", new, "but", text)
        check(all(said == old for _, said in logged[4:]), "not", old, "but", text)
        text = re.sub("^logged: .*\n", "", text, flags=re.M)
        check(text == REFUSED.format(new=logged[0][1], old=old), "said:", text)


ONE_LAYER = """#define TSHARD_IMPLEMENTATION
#include "tshard.h"

static int layer(tsh_ctx *ctx, void *user) {
    tsh_linear_desc desc = {4, 3};
    tsh_module *linear = tsh_add_linear(tsh_root(ctx), "linear", &desc);
    tsh_tensor *y = tsh_forward(linear, tsh_ones(ctx, tsh_shape2(1, 4)));
    tsh_read(ctx, y, TSH_LOCAL, user, 3 * sizeof(tsh_real));
    return !tsh_ok(ctx);
}

int main(void) {
    tsh_real y[3] = {0, 0, 0};
    int result = tsh_run(NULL, layer, y);
    printf("%g %g %g\\n", y[0], y[1], y[2]);
    return result;
}
"""


def one_layer_is_a_small_program(folder):
    """As the manual says to build it."""
    source, program = os.path.join(folder, "small.c"), os.path.join(folder, "small")
    with open(source, "w", encoding="utf-8") as out:
        out.write(ONE_LAYER)
    must([CC, "-std=c99"] + SMALL + ["-I", TOP, source, "-o", program, "-lm"])
    outputs = [float(word) for word in must([program]).split()]
    check(len(outputs) == 3 and all(outputs), "the layer gives zeros:", outputs)
    print("a program with one linear layer has %d bytes" % os.path.getsize(program))
    check(os.path.getsize(program) < SMALL_LIMIT, os.path.getsize(program), "bytes")
    with open(os.path.join(TOP, "README.md"), encoding="utf-8") as file:
        said = int(re.search(r"one linear layer has (\d+) KB", file.read())[1])
    if CC in ("cc", "gcc"):  # others make other code
        check(abs(os.path.getsize(program) / 1024 - said) < 0.1 * said, "README.md says", said,
              "KB")


def descriptors_in_every_cxx(folder):
    """The form that the manual shows, and a whole program, without a warning in C++11 to C++20."""
    with open(os.path.join(TOP, "tshard.h"), encoding="utf-8") as file:
        manual = re.search(r"^ \*   C\+\+:.*?\n \*\n(.*?)\n \*\n", file.read(), re.M | re.S)
    check(manual, "the manual has no chapter on C++")
    source = os.path.join(folder, "manual.cpp")
    with open(source, "w", encoding="utf-8") as out:
        out.write('#include "tshard.h"\ntsh_module *manual(tsh_module *net);\n'
                  "tsh_module *manual(tsh_module *net) {\n%s\n    return first;\n}\n"
                  % re.sub(r"^ \*", "", manual[1], flags=re.M))
    compilers = [name for name in ("g++", "clang++") if shutil.which(name)]
    if not compilers:
        raise Skipped("no C++ compiler is here: apt-get install g++ clang")
    for compiler in compilers:
        for standard in "11", "14", "17", "20":
            for name in source, os.path.join(HERE, "parallel.cpp"):
                must([compiler, "-std=c++" + standard, "-fsyntax-only", "-I", TOP] + STRICT
                     + [name])


# ---- other build systems and packages -----------------------------------------


def tool(name, package):
    """The path of a command, here or in the project's Python environment."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + os.pathsep
                        + os.path.join(TOP, "build", "venv", "bin"))
    if not path:
        raise Skipped("%s is not here: %s" % (name, package))
    return path


def installed_c_file(folder):
    """The .c file beside the installed header, and a program without a macro."""
    include, program = os.path.join(installed(), "include", "tshard"), os.path.join(folder, "first")
    must([CC, "-std=c99", "-O0", PORTABLE] + STRICT
         + ["-I", include, first_example(folder, False), os.path.join(include, "tshard.c"), "-o",
            program, "-lm", "-pthread"])
    check_losses(must([program]))


MESON = """project('user', ['c', 'cpp'], default_options: ['cpp_std=c++11'])
tshard = subproject('tshard')
executable('first', 'first.c', dependencies: dependency('tshard'))
executable('library', 'library.c', dependencies: dependency('tshard-static'))
"""


def meson_subproject(folder):
    """The headers alone, and the implementation as a library."""
    meson = tool("meson", "apt-get install meson, or pip install meson ninja")
    os.mkdir(os.path.join(folder, "subprojects"))
    os.symlink(TOP, os.path.join(folder, "subprojects", "tshard"))
    os.rename(first_example(folder, False), os.path.join(folder, "library.c"))
    first_example(folder)
    with open(os.path.join(folder, "meson.build"), "w", encoding="utf-8") as out:
        out.write(MESON)
    build, path = os.path.join(folder, "build"), os.path.dirname(meson) + ":" + os.environ["PATH"]
    must([meson, "setup", build, folder, "--buildtype=debug"], PATH=path, **FLAGS)
    must([meson, "compile", "-C", build], PATH=path)
    for program in "first", "library":
        check_losses(must([os.path.join(build, program)]))


def conan_package(folder):
    """The recipe makes a package; a program finds it by pkg-config."""
    conan = tool("conan", "pip install conan")
    needs(pkg_config="pkg-config")
    home = os.path.join(folder, "conan")
    must([conan, "profile", "detect"], CONAN_HOME=home)
    must([conan, "create", os.path.join(TOP, "backends", "package")], CONAN_HOME=home)
    must([conan, "install", "--requires=tshard/" + macros(), "-g", "PkgConfigDeps", "-of", folder],
         CONAN_HOME=home)
    flags = must(["pkg-config", "--cflags", "--libs", "tshard"], PKG_CONFIG_PATH=folder).split()
    program = os.path.join(folder, "first")
    must([CC, "-std=c99", "-O0"] + STRICT + [first_example(folder), "-o", program] + flags)
    check_losses(must([program]))


def release_check_says_what_is_missing(folder):
    """A tree is ready when all versions agree, the changelog has a date, and all is committed."""
    needs(git="git")
    tree = os.path.join(folder, "tree")
    for path in ("tshard.h", "meson.build", "README.md", "CHANGELOG.md",
                 "backends/package/release.sh", "backends/package/vcpkg/vcpkg.json"):
        os.makedirs(os.path.dirname(os.path.join(tree, path)), exist_ok=True)
        shutil.copy(os.path.join(TOP, path), os.path.join(tree, path))
    changes = os.path.join(tree, "CHANGELOG.md")
    with open(changes, encoding="utf-8") as file:
        text = file.read()

    def git(*words):
        must(["git", "-C", tree, "-c", "user.name=n", "-c", "user.email=e@x"] + list(words))

    def ask(dated):
        with open(changes, "w", encoding="utf-8") as out:
            out.write(re.sub(r"^(## \[%s\] - ).*" % re.escape(macros()), r"\g<1>" + dated, text,
                             flags=re.M))
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", "m")
        return call(["sh", os.path.join(tree, "backends", "package", "release.sh")])

    git("init", "-q")
    code, said = ask("unreleased")
    check(code and said.count("not ready") == 1 and "CHANGELOG.md begins" in said, said)
    code, said = ask("2026-01-31")
    check(not code and said == "git tag -a v%s -m 'tshard %s'\n" % (macros(), macros()), said)
    git("tag", "v" + macros())
    with open(os.path.join(tree, "meson.build"), "a", encoding="utf-8") as out:
        out.write("\n")
    code, said = call(["sh", os.path.join(tree, "backends", "package", "release.sh")])
    check(code and "the tag v" in said and "not committed" in said, said)


TESTS = [version_is_the_same_everywhere, make_installs_and_uninstalls, add_subdirectory,
         fetch_content, find_package_installed_by_make, find_package_installed_by_cmake,
         find_package_says_what_is_missing, pkg_config, shared_library_from_python,
         structures_of_python_are_those_of_c, shared_library_has_public_functions_only,
         other_builds_are_refused, one_layer_is_a_small_program, descriptors_in_every_cxx,
         installed_c_file, meson_subproject, conan_package, release_check_says_what_is_missing]

if __name__ == "__main__":
    sys.exit(run_tests("consumer", TESTS))
