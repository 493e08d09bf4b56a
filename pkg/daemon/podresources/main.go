// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
)

// Main answers one question of the sriov plugin, from standard input to standard output, within the time that the question allows.
func Main(args []string, stdin io.Reader, stdout io.Writer) int {
	if len(args) > 0 {
		fmt.Fprintf(stdout, "%s %s\n", poddevices.Program, plugin.Version)
		return 0
	}
	answer, err := answerQuestion(stdin)
	if err != nil {
		answer = poddevices.Refusal(err)
	}
	if err := json.NewEncoder(stdout).Encode(answer); err != nil {
		return 1
	}
	return 0
}

func answerQuestion(stdin io.Reader) (a poddevices.Answer, err error) {
	var q poddevices.KubeletQuestion
	if err := json.NewDecoder(stdin).Decode(&q); err != nil {
		return a, fmt.Errorf("want a question of the sriov plugin: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), q.Timeout)
	defer cancel()
	k := At(q.Folder)
	k.Resources, k.Claims = q.Resources, q.InUse
	a.Devices, err = Ask(ctx, k, q.Namespace, q.Pod, q.UID)
	return a, err
}
