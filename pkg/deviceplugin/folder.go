// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"log/slog"
	"time"

	"github.com/fsnotify/fsnotify"
)

// watchFolder calls changed whenever something happened in a folder, until ctx is done. The folder may come later, and go and come again.
func watchFolder(ctx context.Context, dir string, changed func(), log *slog.Logger) {
	for ctx.Err() == nil {
		if err := watchOnce(ctx, dir, changed); err != nil {
			log.Debug("a folder is not watched, only looked at", "folder", dir, "error", err)
		}
		changed()
		select {
		case <-ctx.Done():
		case <-time.After(lookEvery):
		}
	}
}

// watchOnce returns when the folder is gone or ctx is done.
func watchOnce(ctx context.Context, dir string, changed func()) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer w.Close()
	if err := w.Add(dir); err != nil {
		return err
	}
	changed() // what happened before counts as well
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, ok := <-w.Events:
			if !ok || event.Name == dir && event.Op.Has(fsnotify.Remove|fsnotify.Rename) {
				return nil
			}
			changed()
		case err, ok := <-w.Errors: // an overflow: events were lost
			if !ok {
				return err
			}
			changed()
		}
	}
}
