# For find_package(tshard 0.2): the version stands in tshard.h. By semantic versioning, a release
# serves programs written for an earlier one of its major version; before 1.0, of its minor version.

get_filename_component(_tshard_here "${CMAKE_CURRENT_LIST_FILE}" REALPATH)
get_filename_component(_tshard_here "${_tshard_here}" DIRECTORY)
set(PACKAGE_VERSION "")
foreach(_tshard_up ../../../include/tshard ../../../../include/tshard ../..)
    if(NOT PACKAGE_VERSION AND EXISTS "${_tshard_here}/${_tshard_up}/tshard.h")
        file(STRINGS "${_tshard_here}/${_tshard_up}/tshard.h" _tshard_lines
            REGEX "^#define TSHARD_VERSION_(MAJOR|MINOR|PATCH) [0-9]+$")
        string(REGEX REPLACE "#define TSHARD_VERSION_[A-Z]+ " "" PACKAGE_VERSION
            "${_tshard_lines}")
        string(REPLACE ";" "." PACKAGE_VERSION "${PACKAGE_VERSION}")
    endif()
endforeach()

set(_tshard_same "^[0-9]+")
if(PACKAGE_VERSION VERSION_LESS 1.0)
    set(_tshard_same "^0(\\.[0-9]+)?")
endif()
string(REGEX MATCH "${_tshard_same}" _tshard_have "${PACKAGE_VERSION}")
string(REGEX MATCH "${_tshard_same}" _tshard_want "${PACKAGE_FIND_VERSION}")
if(NOT PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION AND
        (_tshard_want STREQUAL _tshard_have OR _tshard_want STREQUAL "0"))
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
    if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
        set(PACKAGE_VERSION_EXACT TRUE)
    endif()
endif()
