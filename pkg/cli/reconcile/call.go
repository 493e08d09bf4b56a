// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/child"
)

const (
	// bannerTimeout bounds the call that asks whether a program is a plugin of Podlace.
	bannerTimeout = 10 * time.Second
	// statusTimeout bounds one plugin's STATUS.
	statusTimeout = 10 * time.Second
)

// ErrForeign means that a program is no plugin of Podlace.
var ErrForeign = errors.New("it is not Podlace's")

// bannerText stands before the version in what Podlace's plugins print without a CNI command.
const bannerText = " plugin of Podlace "

// Version returns the version of a plugin of Podlace, or ErrForeign for another program. If the file is missing or cannot be executed, it
// returns the error of stat(2) or execve(2).
func Version(path string) (string, error) {
	if _, err := os.Stat(path); err != nil {
		return "", err
	}
	var stderr child.Buffer
	cmd := exec.Command(path)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.Stderr = &stderr
	err := child.Run(cmd, bannerTimeout, nil)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return "", err
	}
	line, _, _ := strings.Cut(stderr.String(), "\n")
	_, version, ok := strings.Cut(line, bannerText)
	if err != nil || !ok {
		return "", fmt.Errorf("%w: %s prints %q", ErrForeign, path, line)
	}
	return version, nil
}

// Status calls STATUS of the network's plugins that are Podlace's, and returns an error for each that is not ready.
func Status(n Network, binDir string) (errs []error) {
	for _, p := range n.Plugins {
		if _, err := Version(filepath.Join(binDir, p.Type)); err != nil {
			continue // another plugin may not know the verb
		}
		config, err := inject(p.raw, map[string]any{"name": n.Name, "cniVersion": n.gcVersion()})
		if err == nil {
			err = callPlugin("STATUS", binDir, p.Type, config, statusTimeout)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", p.Type, err))
		}
	}
	return errs
}

// callPlugin runs a CNI verb that needs no attachment. Its error has the code and the message of the plugin.
func callPlugin(verb, binDir, name string, config []byte, timeout time.Duration) error {
	var stdout, stderr child.Buffer
	cmd := exec.Command(filepath.Join(binDir, name))
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=" + verb, "CNI_PATH=" + binDir}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(config), &stdout, &stderr
	err := child.Run(cmd, timeout, nil)
	if err == nil {
		return nil
	}
	var refusal Refusal
	if json.Unmarshal(stdout.Bytes(), &refusal) != nil || refusal.Msg == "" {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return refusal
}

// Refusal is an error that a plugin returned in its output.
type Refusal struct {
	Code uint
	Msg  string
}

// Error returns the code and the message of the plugin's error.
func (r Refusal) Error() string { return fmt.Sprintf("code %d: %s", r.Code, r.Msg) }
