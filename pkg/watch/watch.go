// SPDX-License-Identifier: Apache-2.0

// Package watch tells of changes in a folder of the node, with fsnotify.
package watch

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// lookEvery is how often a folder is looked for that is not there.
const lookEvery = time.Second

// Folder calls changed whenever something happened in a folder, until ctx is done, with the name of the file, or with none when anything
// may have changed. The folder may come later, and go and come again.
func Folder(ctx context.Context, dir string, changed func(name string), log *slog.Logger) {
	for ctx.Err() == nil {
		if err := watchOnce(ctx, dir, changed); err != nil {
			log.Debug("a folder is not watched, only looked at", "folder", dir, "error", err)
		}
		changed("")
		select {
		case <-ctx.Done():
		case <-time.After(lookEvery):
		}
	}
}

// watchOnce returns when the folder is gone or ctx is done.
func watchOnce(ctx context.Context, dir string, changed func(name string)) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer w.Close()
	if err := w.Add(dir); err != nil {
		return err
	}
	changed("") // what happened before counts as well
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, ok := <-w.Events:
			if !ok || event.Name == dir && event.Op.Has(fsnotify.Remove|fsnotify.Rename) {
				return nil
			}
			changed(filepath.Base(event.Name))
		case err, ok := <-w.Errors: // an overflow: events were lost
			if !ok {
				return err
			}
			changed("")
		}
	}
}
