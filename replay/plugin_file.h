// PluginFile: finds and opens the shared libraries that the program needs only now and then. Used by
// torch_plugin.cc and device_plugin.cc.
//
// A plug-in is looked for in $RETRACE_PLUGIN_DIR if that is set, else beside the program, else in
// ../lib/retrace from there. What is opened stays open. Thread-safe.
#ifndef RETRACE_REPLAY_PLUGIN_FILE_H_
#define RETRACE_REPLAY_PLUGIN_FILE_H_

#include <string>

#include "core/status.h"

namespace retrace {

struct PluginFile {
  const char* file;            // "libretrace_torch.so"
  const char* entry;           // the function in it
  const char* what_needs_it;   // "ranks on several hosts need"
  const char* how_to_get_it;   // a sentence
};

// The plug-in's path, or kUnsupported: where it was looked for and how to get it. Opens nothing.
Result<std::string> FindPlugin(const PluginFile& plugin);

// The entry function; kUnsupported where the file can not be opened or has no such function.
Result<void*> OpenPlugin(const PluginFile& plugin);

// kUnsupported unless both are those of this program.
Status CheckPluginVersion(const PluginFile& plugin, int abi, const char* version, int expected_abi);

}  // namespace retrace

#endif  // RETRACE_REPLAY_PLUGIN_FILE_H_
