// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/noderoutes"
	"github.com/podlace/podlace/pkg/store"
)

// removeWait is how long remove waits for the end of the agent.
const removeWait = 30 * time.Second

// remove takes back what the agent did on this node, in the order in which it stops being needed: no pod starts any more, then none reaches
// another node, then no plugin is there. A step that fails does not keep the others from being done. Plugins stay while a pod needs them
// for its DEL.
func remove(ctx context.Context, binDir, confDir string, out io.Writer, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, removeWait)
	defer cancel()
	unlock, err := lockNode(ctx, log)
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.New("podlace-node runs on this node, and would bring all back: delete its DaemonSet or stop its service first")
	}
	if err != nil {
		return err
	}
	defer unlock()
	say := func(done ...string) {
		for _, text := range done {
			fmt.Fprintln(out, text)
		}
	}
	var errs []error
	if confDir != "" {
		done, err := putBack(confDir)
		say(done...)
		errs = append(errs, err)
	}
	changes, err := removeRoutes()
	if changes > 0 {
		say(fmt.Sprintf("removed routes, nexthops and the tunnel: %d changes", changes))
	}
	errs = append(errs, err, removeFile(nodefile.Path, nodefile.Remove, say), removeFile(store.Root+"/"+statusName, removeStatus, say))
	if binDir == "" {
		return errors.Join(errs...)
	}
	records, err := attachment.All()
	damaged, readErr := attachment.Unreadable()
	n := len(records) + len(damaged)
	switch err = errors.Join(err, readErr); {
	case err != nil:
		errs = append(errs, fmt.Errorf("the plugins in %s stay: %w", binDir, err))
	case n > 0:
		errs = append(errs, fmt.Errorf("the plugins in %s stay: %d attachments of pods need them for their end; remove again when they are gone",
			binDir, n))
	default:
		done, err := removePrograms(binDir)
		say(done...)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func removeRoutes() (changes int, err error) {
	host, err := kernel.Host()
	if err != nil {
		return 0, err
	}
	defer host.Close()
	return noderoutes.Remove(&host.NS)
}

// removeFile says that a file was removed, if it was there.
func removeFile(path string, remove func() error, say func(...string)) error {
	if _, err := store.ReadFile(path); err != nil {
		return nil
	}
	err := remove()
	if err == nil {
		say("removed " + path)
	}
	return err
}

func removeStatus() error {
	dir, err := store.Open(store.Root)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Remove(statusName)
}
