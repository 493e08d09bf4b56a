// SPDX-License-Identifier: Apache-2.0

// Package watch reports changes in a folder of the node. The package uses fsnotify.
package watch

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// lookEvery is the time between two attempts to watch a folder that is missing.
const lookEvery = time.Second

// Folder calls changed after each event in a folder until ctx is done, with the name of the file, or "" if any may have changed. The
// folder may be missing, and be deleted and created again.
func Folder(ctx context.Context, dir string, changed func(name string), log *slog.Logger) {
	for ctx.Err() == nil {
		if err := watchOnce(ctx, dir, changed); err != nil {
			log.Debug("a folder cannot be watched; retrying every second", "folder", dir, "error", err)
		}
		changed("")
		select {
		case <-ctx.Done():
		case <-time.After(lookEvery):
		}
	}
}

// watchOnce watches the folder until the folder is gone or ctx is done.
func watchOnce(ctx context.Context, dir string, changed func(name string)) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer w.Close()
	if err := w.Add(dir); err != nil {
		return err
	}
	changed("") // earlier changes count too
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, ok := <-w.Events:
			if !ok || event.Name == dir && event.Op.Has(fsnotify.Remove|fsnotify.Rename) {
				return nil
			}
			changed(filepath.Base(event.Name))
		case err, ok := <-w.Errors: // overflow: events were lost
			if !ok {
				return err
			}
			changed("")
		}
	}
}
