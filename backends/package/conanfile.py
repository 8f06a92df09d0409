"""A recipe for Conan 2: `conan create backends/package` in tshard's folder, then require
tshard/0.2.0. The package is the headers; one file of the program defines TSHARD_IMPLEMENTATION."""

import os
import re

from conan import ConanFile
from conan.tools.files import copy


class Tshard(ConanFile):
    name = "tshard"
    description = "tensors, autograd and tensor-parallel layers in one C99 header"
    license = "MIT"
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    def top(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        with open(os.path.join(self.top(), "tshard.h"), encoding="utf-8") as file:
            self.version = ".".join(re.findall(r"^#define TSHARD_VERSION_[A-Z]+ (\d+)$",
                                               file.read(), re.M))

    def export_sources(self):
        for pattern in "tshard.h", "backends/*.h", "LICENSE":
            copy(self, pattern, self.top(), self.export_sources_folder)

    def package(self):
        include = os.path.join(self.package_folder, "include", "tshard")
        for pattern in "tshard.h", "backends/*.h":
            copy(self, pattern, self.source_folder, include)
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_id(self):
        self.info.clear()

    def package_info(self):
        self.cpp_info.includedirs = [os.path.join("include", "tshard")]
        self.cpp_info.bindirs = self.cpp_info.libdirs = []
        if self.settings.os != "Windows":
            self.cpp_info.system_libs = ["m", "pthread"]
