// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"encoding/json"
	"log/slog"
	"path/filepath"

	"github.com/podlace/podlace/pkg/plugin"
)

// logging are the log settings, with the keys of sriov-cni.
type logging struct {
	LogLevel string `json:"logLevel"`
	LogFile  string `json:"logFile"`
}

var levels = map[string]slog.Level{"": slog.LevelInfo, "debug": slog.LevelDebug, "info": slog.LevelInfo, "warning": slog.LevelWarn,
	"error": slog.LevelError, "panic": slog.LevelError}

func parseLogging(_ *config, raw rawConfig, _ *plugin.Request) error {
	if _, ok := levels[raw.LogLevel]; !ok {
		return plugin.Errorf(plugin.CodeConfig, "logLevel %q: want debug, info, warning, error or panic", raw.LogLevel)
	}
	if raw.LogFile != "" && !filepath.IsAbs(raw.LogFile) {
		return plugin.Errorf(plugin.CodeConfig, "logFile %q: want an absolute path", raw.LogFile)
	}
	return nil
}

// openLog sets up the log of a verb, even if other parts of the configuration are invalid. An unwritable file is not an error.
func openLog(r *plugin.Request) {
	var to logging // read even if another key is invalid
	_ = json.Unmarshal(r.Config, &to)
	if to != (logging{}) && (to.LogFile == "" || filepath.IsAbs(to.LogFile)) {
		if err := r.LogTo(to.LogFile, levels[to.LogLevel]); err != nil {
			r.Log.Warn("cannot write to logFile; logging to standard error only", "error", err)
		}
	}
}
